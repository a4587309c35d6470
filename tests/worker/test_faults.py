# SPDX-License-Identifier: Apache-2.0
"""Faults in what a step computes come to the request that they are meant for."""

from __future__ import annotations

import pytest
import torch

from pagoda.faults.injector import FaultPlan, FaultPoint, Faults, InjectedFaultError
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.worker.faults import StepFaults, spoil_rows


def _point(schedule: str) -> FaultPoint:
    point = Faults(FaultPlan(schedule)).point(schedule.partition(":")[0])
    assert point is not None
    return point


@pytest.mark.parametrize(("action", "spoilt"), [("nan", torch.isnan), ("inf", torch.isinf)])
def test_one_row_is_spoilt(action: str, spoilt: object) -> None:
    hidden = torch.zeros(3, 4)
    spoil_rows(_point(f"worker.logits:{action}~bad"), hidden, {"good": 0, "bad-1": 2})
    assert callable(spoilt)
    assert spoilt(hidden).all(dim=1).tolist() == [False, False, True]
    assert hidden[:2].eq(0).all()


def test_rows_of_others_pass() -> None:
    point, hidden = _point("worker.logits:raise~bad"), torch.zeros(1, 4)
    spoil_rows(point, hidden, {"good": 0})
    with pytest.raises(InjectedFaultError):
        spoil_rows(point, hidden, {"bad": 0})


def test_steps_are_told_by_the_requests_in_them() -> None:
    faults = StepFaults(_point("worker.step:raise~bad"))
    starts = [
        SlotStart(
            slot=slot,
            request_id=name,
            token_ids=[1],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            block_ids=[[0]],
            work=Work(SamplingParams(), eos_token_ids=()),
        )
        for slot, name in enumerate(("good", "bad"))
    ]
    faults.hit(StepPlan(0, [0], [1], starts=starts))
    with pytest.raises(InjectedFaultError):
        faults.hit(StepPlan(1, [0, 1], [1, 1]))
