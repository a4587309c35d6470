# SPDX-License-Identifier: Apache-2.0
"""The last minutes of a server's figures, so that the charts of a page are full when it is opened."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pagoda.messages.frontend import StepBin

KEPT_S = 300
"""Seconds of figures that are kept."""
STEPS_KEPT_S = 60
STEPS_BIN_S = 0.1
"""Seconds whose steps share a bin: less than a bar of the timeline takes on a wide page."""
MAX_STEPS = 8192
"""Step bins that are kept, of all replicas together: the latest."""
_REST_S = 3.0
"""Seconds between two points of a time in which nothing went on; a chart joins points that are so near."""
CHARTED = (
    *("prompt_tokens_per_s", "output_tokens_per_s", "ttft_ms", "itl_ms"),
    *("num_running", "num_waiting", "num_awaiting_kv"),
)
"""Figures of a snapshot that charts show."""
AT_REST: Mapping[str, Any] = dict.fromkeys(CHARTED, 0) | {"ttft_ms": None, "itl_ms": None}
"""Figures of a server with nothing to do."""


class LiveHistory:
    """Figures with their times, on the clock of whoever adds them. Takes bounded memory."""

    def __init__(self, since: float) -> None:
        self._points: deque[tuple[float, Mapping[str, Any]]] = deque(maxlen=KEPT_S)
        self._steps: OrderedDict[tuple[str, int], tuple[float, StepBin]] = OrderedDict()
        """Step bins with the times at which they ended, by replica and number of the bin."""
        self._resting_since: float | None = since

    def add(
        self, now: float, figures: Mapping[str, Any], steps: Mapping[str, Sequence[StepBin]]
    ) -> None:
        """Takes a snapshot's figures, and the steps that ended before it, whose `age_s` counts from now."""
        if self._resting_since is not None:
            self._points.extend(_at_rest(self._resting_since, now))
            self._resting_since = None
        self._points.append((now, {name: figures[name] for name in CHARTED}))
        for replica, bins in steps.items():
            for one in bins:
                ended = now - one.age_s
                place = replica, int(ended / STEPS_BIN_S)
                before = self._steps.get(place)
                self._steps[place] = ended, one if before is None else before[1].joined(one)
        while len(self._steps) > MAX_STEPS:
            self._steps.popitem(last=False)

    def rest(self, now: float) -> None:
        """Notes that nothing goes on until figures are added again."""
        self._resting_since = now

    def points(self, now: float) -> list[dict[str, Any]]:
        """The figures of the last minutes with their `age_s`, the oldest first."""
        resting = self._resting_since
        kept = [*self._points, *(() if resting is None else _at_rest(resting, now))]
        return [{"age_s": round(now - at, 2), **it} for at, it in kept if now - at <= KEPT_S]

    def steps(self, now: float) -> dict[str, list[StepBin]]:
        """The steps of the last minute by replica, in the order in which they were told."""
        kept: dict[str, list[StepBin]] = {}
        for (replica, _), (ended, one) in self._steps.items():
            if now - ended < STEPS_KEPT_S:
                age_s = round(now - ended, 4)
                kept.setdefault(replica, []).append(msgspec.structs.replace(one, age_s=age_s))
        return kept


def _at_rest(since: float, until: float) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Points of a time in which nothing went on, as far back as points are kept."""
    at = max(since, until - KEPT_S)
    while at < until:
        yield at, AT_REST
        at += _REST_S
