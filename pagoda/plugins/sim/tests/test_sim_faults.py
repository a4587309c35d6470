# SPDX-License-Identifier: Apache-2.0
"""Schedules of faults on the simulated executor: the same faults in each run, and never another answer."""

from __future__ import annotations

import pytest
from harness import Harness, expected_tokens

from pagoda.executor.base import Executor
from pagoda.faults.injector import FaultPlan
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.frontend import FinishReason, GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.sim.executor import SimExecutor
from pagoda.plugins.sim.faults import with_faults

STEP_TIMEOUT_S = 5.0


def _serve(schedule: str) -> tuple[Harness, list[GenerateRequest]]:
    def wrap(inner: SimExecutor, clock: VirtualClock) -> Executor:
        return with_faults(inner, clock, FaultPlan(schedule), STEP_TIMEOUT_S)

    harness = Harness(wrap=wrap)
    requests = [
        GenerateRequest(
            request_id=f"r{index}",
            prompt_token_ids=[index, 1, 2],
            work=Work(SamplingParams(seed=index, max_tokens=12)),
        )
        for index in range(8)
    ]
    for request in requests:
        harness.add(request)
    harness.run()
    return harness, requests


@pytest.mark.parametrize(
    "schedule",
    [
        "worker.step:kill@*7",
        "worker.step:raise@5,9",
        "worker.step:oom@5",
        "worker[1].step:stop@5",
        "worker[1].step:hang@5",
        "worker[1].result:drop@4",
        "worker[1].result:double@4",
        "worker[1].result:reorder@4",
        "seed=3 worker.step:kill%0.05 worker.result:drop%0.02 worker.result:double%0.02",
    ],
)
def test_answers_are_the_same(schedule: str) -> None:
    harness, requests = _serve(schedule)
    for request in requests:
        assert harness.tokens[request.request_id] == expected_tokens(request, 64)
        assert harness.finished[request.request_id].finish_reason is FinishReason.LENGTH
    assert harness.core.load().num_worker_restarts > 0
    again, _ = _serve(schedule)
    assert again.clock.now() == harness.clock.now()
    assert again.core.load() == harness.core.load()


@pytest.mark.parametrize(
    ("action", "num_losses"),
    [("kill", 4), ("crash", 4), ("raise", 4), ("oom", 4), ("hang", 2), ("stop", 2)],
)
def test_a_request_that_ends_workers_fails_alone(action: str, num_losses: int) -> None:
    """Together with all others twice, then alone twice; a step that hangs counts twice."""
    harness, requests = _serve(f"worker.step:{action}~r3")
    assert harness.core.load().num_worker_restarts == num_losses
    for request in requests:
        chunk = harness.finished[request.request_id]
        if request.request_id == "r3":
            assert chunk.finish_reason is FinishReason.ERROR
            assert "The worker died" in (chunk.error or "")
        else:
            assert harness.tokens[request.request_id] == expected_tokens(request, 64)
