# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from fragment_files import read_fragments

from pagoda.errors import ConfigError
from pagoda.fleet.trace_control import EndedTrace, TraceControl, TraceStateError
from pagoda.messages.tracing import StartTrace
from pagoda.telemetry.fragments import FragmentWriter
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession


class Engines:
    """Stops when told to, or when `done` is set."""

    def __init__(self) -> None:
        self.orders: list[StartTrace] = []
        self.num_stops = 0
        self.done = asyncio.Event()
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    def start_trace(self, order: StartTrace) -> None:
        self.orders.append(order)

    async def stop_trace(self) -> list[str]:
        self.num_stops += 1
        await self.may_stop.wait()
        return ["engine dp0: it is full."]

    async def trace_ended(self) -> None:
        await self.done.wait()


def control(directory: Path, engines: Engines | None = None) -> TraceControl:
    made = TraceControl(Tracer("frontend"), [RequestTracker()], directory, "serve-1")
    if engines is not None:
        made.join(engines)
    return made


async def until_off(it: TraceControl) -> None:
    async with asyncio.timeout(20):
        while it.session is not None:
            await asyncio.sleep(0)


async def test_all_are_told_of_the_same(tmp_path: Path) -> None:
    engines = Engines()
    it = control(tmp_path / "traces", engines)
    session = await it.start(TraceLevel.KERNEL)
    assert engines.orders == [StartTrace(session)]
    assert (session.level, session.run) == (TraceLevel.KERNEL, "serve-1")
    assert session.directory == str((tmp_path / "traces").absolute())
    assert await it.stop() == EndedTrace(session, ["engine dp0: it is full."])
    assert it.session is None
    (fragment,) = read_fragments(tmp_path / "traces")
    assert fragment.header.role == "frontend"


async def test_those_that_come_later_are_told_what_is_traced(tmp_path: Path) -> None:
    it, engines = control(tmp_path), Engines()
    session = await it.start(TraceLevel.E2E)
    it.join(engines)
    assert engines.orders == [StartTrace(session)]
    await it.stop()
    later = Engines()
    it.join(later)
    assert later.orders == []


async def test_it_is_on_or_off(tmp_path: Path) -> None:
    engines = Engines()
    it = control(tmp_path, engines)
    with pytest.raises(TraceStateError, match=r"^Tracing is off\.$"):
        await it.stop()
    both = it.start(TraceLevel.E2E), it.start(TraceLevel.E2E)
    started, refused = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(started, TraceSession)
    assert (type(refused), str(refused)) == (TraceStateError, "Tracing is on already.")
    assert len(engines.orders) == 1
    engines.may_stop.clear()
    first, second = asyncio.create_task(it.stop()), asyncio.create_task(it.stop())
    await asyncio.sleep(0)
    with pytest.raises(TraceStateError, match="on already"):
        await it.start(TraceLevel.E2E)
    engines.may_stop.set()
    assert await first == await second
    assert engines.num_stops == 1


async def test_what_a_trace_that_ended_by_itself_lacks_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = Engines()
    it = control(tmp_path, engines)
    session = await it.start(TraceLevel.KERNEL, num_steps=3)
    assert engines.orders == [StartTrace(session, 3)]
    engines.done.set()
    await until_off(it)
    assert "a trace lacks something: engine dp0: it is full." in caplog.text
    assert await it.stop() == EndedTrace(session, ["engine dp0: it is full."])
    with pytest.raises(TraceStateError, match="off"):
        await it.stop()
    await it.start(TraceLevel.E2E, seconds=0.01)
    await until_off(it)
    await it.start(TraceLevel.E2E)
    await it.stop()
    with pytest.raises(TraceStateError, match="off"):  # nobody asks for the one before the last
        await it.stop()


async def test_answers_in_all_trackers_have_rows(tmp_path: Path) -> None:
    trackers = [RequestTracker(), RequestTracker()]
    it = TraceControl(Tracer("frontend"), trackers, tmp_path, "serve-1")
    await it.start(TraceLevel.E2E)
    for index, tracker in enumerate(trackers):
        record = tracker.start(
            f"r{index}",
            ClientRequest(id=f"r{index}", arrived_ns=1),
            num_prompt_tokens=1,
            max_tokens=1,
        )
        tracker.finish(record, "stop")
    await it.stop()
    (fragment,) = read_fragments(tmp_path)
    assert {e["args"]["request"] for e in fragment.named("request")} == {"r0", "r1"}


async def test_who_stops_early_leaves_no_timer(tmp_path: Path) -> None:
    it = control(tmp_path, Engines())
    for length in ({"seconds": 3600}, {"num_steps": 1}):
        await it.start(TraceLevel.E2E, **length)
        await it.stop()
    assert len(asyncio.all_tasks()) == 1


async def test_a_new_trace_removes_the_one_before_it(tmp_path: Path) -> None:
    it = control(tmp_path)
    other = tmp_path / "serve-2.frontend.0.0.fragment.jsonl"
    other.write_text("")
    for _ in range(2):
        await it.start(TraceLevel.E2E)
        await it.stop()
    assert len(list(tmp_path.iterdir())) == 2
    assert other.exists()


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "taken").write_text("")
    directory = Path("/proc") if is_there else tmp_path / "taken"  # where nothing can be made
    it = control(directory)
    with pytest.raises(
        ConfigError, match=rf"^--profile-dir {directory} cannot be written \([A-Z].*\)\.$"
    ):
        await it.start(TraceLevel.E2E)
    assert it.session is None
    with pytest.raises(ConfigError):  # not: it is on already
        await it.start(TraceLevel.E2E)


async def test_a_directory_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, left = threading.Event(), threading.Event()
    monkeypatch.setattr(Path, "touch", lambda *_, **__: released.wait() and left.set())
    monkeypatch.setattr("pagoda.fleet.trace_control._PREPARE_S", 0.01)
    it = control(tmp_path)
    with pytest.raises(ConfigError, match=r"\(it does not answer within 0\.01 s\)\.$"):
        await it.start(TraceLevel.E2E)
    assert it.session is None
    released.set()
    assert left.wait(20)


async def test_a_disk_that_hangs_at_the_end_does_not_keep_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = control(tmp_path)
    await it.start(TraceLevel.E2E)
    released = threading.Event()
    monkeypatch.setattr(FragmentWriter, "close", lambda *_: released.wait())
    stopping = asyncio.create_task(it.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    released.set()
    await stopping
