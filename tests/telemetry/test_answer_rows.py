# SPDX-License-Identifier: Apache-2.0
"""Rows of answers in traces (`pagoda.fleet.trace_control`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fragment_files import Fragment, assert_nested, end_of, read_fragments
from scripted_endpoint import TEXT, ScriptedEndpoint
from ticking_clock import TickingClock

from pagoda.errors import OverloadedError
from pagoda.fleet.trace_control import AnswerRows
from pagoda.messages.sampling_params import SamplingParams
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession
from pagoda.text.draft import Draft
from pagoda.text.text_generator import TextDelta, TextGenerator


class Rig:
    def __init__(self, directory: Path, answer: str = "abc") -> None:
        self.clock = TickingClock()
        self.tracker = RequestTracker(self.clock)
        self.endpoint = ScriptedEndpoint(answer)
        self.texts = TextGenerator(self.endpoint, TEXT, self.tracker)
        self.tracer = Tracer("frontend", clock_ns=self.clock)
        self._directory = directory

    def start(self, level: TraceLevel = TraceLevel.E2E) -> AnswerRows:
        session = TraceSession(level=level, directory=str(self._directory), run="serve-1")
        self.tracer.start(session)
        return AnswerRows(self.tracer, self.tracker)

    def stop(self, rows: AnswerRows) -> Fragment:
        rows.close()
        self.tracer.stop()
        (fragment,) = read_fragments(self._directory)
        assert_nested(fragment)
        return fragment

    async def stream(self, name: str) -> AsyncGenerator[TextDelta, None]:
        client_request = ClientRequest(id=name, arrived_ns=self.clock())
        self.clock.now += 50_000
        [request] = await self.texts.prepare(
            "hi", SamplingParams(max_tokens=9), Draft(client_request=client_request)
        )
        return self.texts.stream(request)

    async def read(self, name: str) -> None:
        """As a client that takes 10 µs for each event."""
        async for _ in await self.stream(name):
            self.clock.now += 10_000


async def test_an_answer_has_a_row_from_its_first_to_its_last_byte(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.endpoint.num_cached_tokens = 2
    rows = rig.start()
    await rig.read("r")
    assert not rig.tracker.running
    fragment = rig.stop(rows)
    (name,) = [name for name in fragment.rows.values() if name != "main"]
    assert name.startswith("request r-")
    prepare, first, stream, whole = fragment.request(name.removeprefix("request "))
    names = [span["name"] for span in (prepare, first, stream, whole)]
    assert names == ["prepare", "first token", "stream", "request"]
    assert (prepare["ts"], end_of(stream)) == (whole["ts"], end_of(whole))
    assert prepare["dur"] > 50
    assert (end_of(prepare), end_of(first)) == (first["ts"], stream["ts"])
    args = whole["args"]
    assert name == f"request {args['request']}"
    assert (args["prompt_tokens"], args["output_tokens"]) == (2, 4)
    assert (args["cached_tokens"], args["finish_reason"]) == (2, "stop")
    # The first token has been handed on when the client wants the next one.
    assert first["dur"] > 10
    assert args["write_ms"] == pytest.approx(4 * 0.011)
    assert 0 < args["detokenize_ms"] < 0.02
    assert "queue_ms" not in args


@pytest.mark.parametrize(("level", "count"), [(TraceLevel.KERNEL, 0), (TraceLevel.VERBOSE, 3)])
async def test_each_token_has_a_span_only_when_asked_for(
    tmp_path: Path, level: TraceLevel, count: int
) -> None:
    rig = Rig(tmp_path)
    rows = rig.start(level)
    await rig.read("r")
    assert len(rig.stop(rows).named("token")) == count  # the first is the end of another span


async def test_answers_that_run_are_written_as_far_as_they_are(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    before = await rig.stream("before")
    await anext(before)
    rows = rig.start()
    during = await rig.stream("during")
    await anext(during)
    fragment = rig.stop(rows)
    async with aclosing(before), aclosing(during):
        pass
    for name in fragment.rows.values():
        if name != "main":
            *_, whole = spans = fragment.request(name.removeprefix("request "))
            assert whole["args"]["finish_reason"] == ""
            names = [span["name"] for span in spans]
            assert names == ["prepare", "first token", "stream", "request"]
    assert len(fragment.named("request")) == 2


async def test_a_client_that_goes_away_and_a_refusal_have_an_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rows = rig.start()
    leaving = await rig.stream("leaves")
    await anext(leaving)
    await leaving.aclose()
    rig.endpoint.raises = OverloadedError("The waiting queue is full.")
    with pytest.raises(OverloadedError):
        await rig.read("refused")
    fragment = rig.stop(rows)
    left, refused = fragment.named("request")
    assert left["args"]["finish_reason"] == "abort"
    assert refused["args"]["finish_reason"] == "refused"
    assert _row_of(fragment, left) == ["prepare", "first token", "stream", "request"]
    assert _row_of(fragment, refused) == ["prepare", "waiting", "request"]


async def test_an_answer_without_a_token_has_waited_until_the_end(tmp_path: Path) -> None:
    """Where there was no first token, no span says when it came."""
    rig = Rig(tmp_path)
    rows = rig.start()
    client_request = ClientRequest(id="r", arrived_ns=rig.clock())
    record = rig.tracker.start("r-1", client_request, num_prompt_tokens=2, max_tokens=9)
    rig.tracker.finish(record, "abort")
    fragment = rig.stop(rows)
    prepare, waiting, whole = fragment.request("r-1")
    assert waiting["name"] == "waiting"
    assert (waiting["ts"], end_of(waiting)) == (end_of(prepare), end_of(whole))


def _row_of(fragment: Fragment, whole: dict[str, Any]) -> list[str]:
    return [span["name"] for span in fragment.request(whole["args"]["request"])]


async def test_the_tracker_has_no_listeners_when_nothing_is_traced(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rows = rig.start()
    rig.stop(rows)
    assert rig.tracker.num_listeners == 0
    before = rig.clock.now
    await rig.read("r")
    # The request, its arrival, the time left, the beginning, four times tokens, the end; and the 90 µs of it all.
    assert rig.clock.now - before == 50_000 + 4 * 10_000 + 8 * 1000
