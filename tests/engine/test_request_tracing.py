# SPDX-License-Identifier: Apache-2.0
"""The rows of requests in a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from fragment_files import phases_of, read_fragments

from pagoda.engine.request import Request, RequestState
from pagoda.engine.request_tracing import RequestRows
from pagoda.messages.frontend import FinishReason
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession


@dataclass
class Seen:
    """What rows read of a request."""

    state: RequestState = RequestState.NEW
    request_id: str = "r"
    slot: int | None = 3
    num_computed_tokens: int = 0
    num_tokens: int = 9
    num_prompt_tokens: int = 9
    num_cached_tokens: int = 0
    num_output_tokens: int = 3
    admission: int | None = None

    @property
    def is_awaiting_kv(self) -> bool:
        return self.state is RequestState.AWAITING_KV


@pytest.fixture
def tracer(tmp_path: Path) -> Tracer:
    made = Tracer("engine dp0")
    made.start(TraceSession(level=TraceLevel.E2E, directory=str(tmp_path), run="r"))
    return made


def move(rows: RequestRows, request: Seen, *states: RequestState) -> None:
    for state in states:
        before, request.state = request.state, state
        rows.moved(cast(Request, request), before)
        if state is RequestState.RUNNING:
            rows.sampled(cast(Request, request))


def test_one_preemption_is_one_span(tracer: Tracer, tmp_path: Path) -> None:
    rows, request, state = RequestRows(tracer), Seen(), RequestState
    move(rows, request, state.WAITING, state.RUNNING, state.WAITING)
    move(rows, request, state.AWAITING_KV, state.WAITING, state.RUNNING)
    rows.ended(cast(Request, request), FinishReason.STOP)
    tracer.stop()
    (fragment,) = read_fragments(tmp_path)
    assert phases_of(fragment, "r") == [
        "queued", "prefill", "decode", "preempted", "waiting for KV", "queued", "prefill", "decode",
    ]  # fmt: skip
    assert fragment.request("r")[-1]["args"]["preemptions"] == 1


def test_what_is_said_of_an_unknown_slot_is_left_out(tracer: Tracer) -> None:
    rows = RequestRows(tracer)
    move(rows, Seen(), RequestState.RUNNING)
    known, tokens = rows.of_slots([2, 3, 4], [20, 30, 40])
    assert (len(known), tokens) == (1, [30])
    assert rows.of_slots([2], [20]) == ([], [])
    tracer.stop()
