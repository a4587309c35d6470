# SPDX-License-Identifier: Apache-2.0
"""Faults in what a step computes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from pagoda.faults.injector import FaultPoint
from pagoda.messages.worker import StepPlan


class StepFaults:
    """The faults of steps, which concern requests."""

    def __init__(self, point: FaultPoint) -> None:
        self._point = point
        self._names: dict[int, str] = {}
        """Ids of requests by slot."""

    def hit(self, plan: StepPlan) -> None:
        """Passes the point. Raises what the point raises."""
        self._names |= {start.slot: start.request_id for start in plan.starts}
        self._point.hit(self._names[slot] for slot in plan.slots)


def spoil_rows(point: FaultPoint, hidden: Tensor, rows: Mapping[str, int]) -> None:
    """Passes the point once for each of `rows`, by request; makes its row of hidden states NaN or infinite.

    Raises what the point raises.
    """
    for request_id, row in rows.items():
        actions = point.hit([request_id])
        if "nan" in actions:
            hidden[row] = math.nan
        elif "inf" in actions:
            hidden[row] = math.inf
