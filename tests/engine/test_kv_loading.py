# SPDX-License-Identifier: Apache-2.0
"""Several events of one request in one turn of the engine: a load ends while its request does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Harness, assert_complete, make_request

from pagoda.engine.request import RequestState
from pagoda.executor.base import ExecutorEvent
from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.frontend import FinishReason
from pagoda.plugins.disaggregation.connector import Arrived, Failed
from pagoda.plugins.disaggregation.messages import KVPrefilled
from pagoda.plugins.disaggregation.token_conditions import token_conditions

PROMPT = [1] * 40


def loading() -> Harness:
    """An engine in which the transfer of request `r` has ended, and the scheduler has yet to be told."""
    harness = Harness(num_blocks=16, kv_host_slots=64, kv_tiers=KVTiersConfig(host_bytes=1))
    for token in (1, 2, 3):
        harness.add(make_request(f"filling {token}", [token] * 40, max_tokens=2))
        harness.run()
    harness.add(make_request("r", PROMPT, max_tokens=1))
    assert harness.scheduler.requests["r"].state is RequestState.LOADING
    ends: list[ExecutorEvent] = []
    while not ends:
        harness.clock.advance_to(harness.core.next_wakeup() or 0.0)
        ends = harness.core.executor.poll()
    for end in ends:
        harness.tiers.transfer_ended(end)  # type: ignore[arg-type]
    return harness


def abort(harness: Harness) -> list[FinishReason | None]:
    harness.core.abort("r")
    return [chunk.finish_reason for chunk in harness.hooks.apply_events()]


def last_token(harness: Harness) -> list[FinishReason | None]:
    request = harness.scheduler.requests["r"]
    key = harness.scheduler.kv.sequence_key(request.table, request.token_ids)
    conditions = token_conditions(request.work.sampling, request.end_token_ids, 0)
    arrived = Arrived("r", KVPrefilled("t", key, 1, 7, conditions))
    return [chunk.finish_reason for chunk in harness.hooks.apply_events([arrived])]


def failure(harness: Harness) -> list[FinishReason | None]:
    events = [Failed("r", "it is gone"), Failed("r", "it is gone")]
    return [chunk.finish_reason for chunk in harness.hooks.apply_events(events)]


@pytest.mark.parametrize(
    ("finish", "reasons"),
    [(abort, []), (last_token, [FinishReason.LENGTH]), (failure, [FinishReason.ERROR])],
)
def test_a_load_may_end_in_the_turn_in_which_its_request_does(
    finish: Callable[[Harness], list[FinishReason | None]], reasons: list[FinishReason]
) -> None:
    harness = loading()
    assert finish(harness) == reasons
    harness.run()


def test_a_load_that_ended_is_not_taken_for_that_of_a_new_request_with_the_same_id() -> None:
    harness = loading()
    harness.core.abort("r")
    again = make_request("r", PROMPT, max_tokens=3)
    harness.tokens["r"] = []
    assert harness.core.add(again) == []
    assert harness.scheduler.requests["r"].state is RequestState.LOADING
    assert harness.hooks.apply_events() == []
    assert harness.scheduler.requests["r"].state is RequestState.LOADING
    harness.run()
    assert_complete(harness, [again])
