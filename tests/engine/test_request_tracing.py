"""The rows of requests in a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from fragment_files import phases_of, read_fragments

from pagoda.engine.request import Request
from pagoda.engine.request_tracing import RequestRows
from pagoda.messages.frontend import FinishReason
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession


@dataclass
class Seen:
    """Rows of a request."""

    request_id: str = "r"
    slot: int | None = 3
    num_computed_tokens: int = 0
    num_tokens: int = 9
    num_prompt_tokens: int = 9
    num_cached_tokens: int = 0
    num_output_tokens: int = 3
    admission: int | None = None


@pytest.fixture
def tracer(tmp_path: Path) -> Tracer:
    made = Tracer("engine dp0")
    made.start(TraceSession(level=TraceLevel.E2E, directory=str(tmp_path), run="r"))
    return made


def test_one_preemption_is_one_span(tracer: Tracer, tmp_path: Path) -> None:
    rows, request = RequestRows(tracer), cast(Request, Seen())
    rows.queued(request)
    rows.admitted(request)
    rows.sampled(request)
    rows.preempted(request)
    rows.queued(request)
    rows.awaits_kv(request)  # which was moved to another place meanwhile
    rows.queued(request)
    rows.admitted(request)
    rows.sampled(request)
    rows.ended(request, FinishReason.STOP)
    tracer.stop()
    (fragment,) = read_fragments(tmp_path)
    assert phases_of(fragment, "r") == [
        "queued", "prefill", "decode", "preempted", "waiting for KV", "queued", "prefill", "decode",
    ]  # fmt: skip
    assert fragment.request("r")[-1]["args"]["preemptions"] == 1


def test_what_is_said_of_an_unknown_slot_is_left_out(tracer: Tracer) -> None:
    rows = RequestRows(tracer)
    rows.admitted(cast(Request, Seen()))
    known, tokens = rows.of_slots([2, 3, 4], [20, 30, 40])
    assert (len(known), tokens) == (1, [30])
    assert rows.of_slots([2], [20]) == ([], [])
    tracer.stop()
