# SPDX-License-Identifier: Apache-2.0
"""A router traces its hosts, over real sockets and with hosts that say what they should not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fragment_files import read_fragments
from linked_hosts import Host, until
from scripted_endpoint import ScriptedEndpoint

from pagoda.fleet.trace_control import EndedTrace, TraceControl
from pagoda.ipc.codec import Codec
from pagoda.messages.ranges import MAX_ITEMS
from pagoda.messages.tracing import (
    MAX_FRAGMENTS,
    MAX_PART_BYTES,
    FetchFragment,
    FragmentPart,
    HostTraceStopped,
    StartTrace,
    StopTrace,
)
from pagoda.plugins.router.host_traces import FetchedTrace, HostTrace
from pagoda.plugins.router.messages import HostMessage, RouterMessage
from pagoda.telemetry.fragments import clear_fragments
from pagoda.telemetry.request_tracker import RequestTracker
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession

NAME = "serve-1.engine-dp0.u.7.fragment.jsonl"


def order(directory: Path, level: TraceLevel = TraceLevel.KERNEL) -> StartTrace:
    return StartTrace(TraceSession(level=level, directory=str(directory), run="route-1"))


def control(directory: Path) -> TraceControl:
    return TraceControl(Tracer("frontend"), [RequestTracker()], directory, "serve-1")


async def test_fragments_of_any_length_come_as_they_are(tmp_path: Path) -> None:
    there, here = control(tmp_path / "host"), tmp_path / "router"
    here.mkdir()
    async with Host(ScriptedEndpoint(), tracing=there) as host:
        client = await host.dial()
        for _ in range(2):
            trace = client.start_trace(order(here))
            await until(lambda: there.session is not None)
            assert there.session is not None
            assert (there.session.level, there.session.run) == (TraceLevel.KERNEL, "serve-1")
            assert there.session.directory == str(tmp_path / "host")
            long = tmp_path / "host" / NAME
            long.write_bytes(b"x" * (2 * MAX_PART_BYTES) + b"y")
            assert await trace.stop() == []
            assert there.session is None
            names = {path.name for path in (tmp_path / "host").iterdir()}
            assert len(names) == 2
            assert {path.name for path in here.iterdir()} == {f"route-1.{name}" for name in names}
            assert (here / f"route-1.{NAME}").read_bytes() == long.read_bytes()
            assert (here / f"route-1.{NAME}").stat().st_mode & 0o777 == 0o600
            clear_fragments(here, "route-1")  # as the next trace does
            assert list(here.iterdir()) == []
        await client.close()


async def test_a_host_that_traces_already_goes_on(tmp_path: Path) -> None:
    there = control(tmp_path / "host")
    async with Host(ScriptedEndpoint(), tracing=there) as host:
        client = await host.dial()
        session = await there.start(TraceLevel.E2E)
        [problem] = await client.start_trace(order(tmp_path)).stop()
        assert problem.endswith(": Tracing is on already.")
        assert there.session is session
        await client.close()
        await there.stop()
    async with Host(ScriptedEndpoint()) as host:
        client = await host.dial()
        [problem] = await client.start_trace(order(tmp_path)).stop()
        assert problem.endswith(": This host cannot be traced.")
        await client.close()


async def test_whoever_goes_leaves_the_other_without_a_trace(tmp_path: Path) -> None:
    there = control(tmp_path / "host")
    host = Host(ScriptedEndpoint(), tracing=there)
    client = await host.dial()
    client.start_trace(order(tmp_path))
    await until(lambda: there.session is not None)
    await client.close()
    await until(lambda: there.session is None)
    assert len(read_fragments(tmp_path / "host")) == 1
    client = await host.dial()
    trace = client.start_trace(order(tmp_path))
    await host.door.close()
    [problem] = await trace.stop()
    assert problem.endswith("what it has traced is in its own --profile-dir.")
    await client.close()
    host.context.term()


async def test_problems_that_hosts_tell_never_break_what_a_router_tells_above(
    tmp_path: Path,
) -> None:
    told = ["the host at tcp://10.0.0.1:5601: " + "x" * MAX_ITEMS, *["short"] * MAX_FRAGMENTS]

    class Owner:
        directory, run = tmp_path, "route-1"

        async def start(self, level: TraceLevel) -> TraceSession:
            return order(tmp_path, level).session

        async def stop(self) -> EndedTrace:
            return EndedTrace(order(tmp_path).session, told)

    trace, codec = HostTrace(Owner()), Codec[HostMessage](HostMessage)
    await trace.answer(order(tmp_path))
    stopped = await trace.answer(StopTrace())
    assert isinstance(stopped, HostTraceStopped)
    assert codec.decode(codec.encode(stopped)) == stopped
    assert stopped.problems == [told[0][:MAX_ITEMS], *told[1:MAX_FRAGMENTS]]


Answer = Callable[[FetchFragment], FragmentPart | HostTraceStopped]


@pytest.mark.parametrize(
    ("names", "answer", "left"),
    [
        (["../a.fragment.jsonl", "/a.fragment.jsonl", "a", ".fragment.jsonl", "a\0.fragment.jsonl"], None, ""),
        (["x" * 400 + ".fragment.jsonl"], None, ""),
        ([NAME], lambda asked: FragmentPart("other", asked.offset, b"x"), NAME),
        ([NAME], lambda asked: FragmentPart(asked.name, 7, b"x"), NAME),
        ([NAME], lambda asked: FragmentPart(asked.name, 0, b"x" * (MAX_PART_BYTES + 1)), NAME),
        ([NAME], lambda _: HostTraceStopped(), NAME),
    ],
)  # fmt: skip
async def test_what_a_host_must_not_say_is_not_taken(
    tmp_path: Path, names: list[str], answer: Answer | None, left: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    asked: list[RouterMessage] = []

    def send(message: RouterMessage) -> None:
        asked.append(message)
        if isinstance(message, StopTrace):
            trace.receive(HostTraceStopped(["The disk was full."], names))
        elif isinstance(message, FetchFragment) and answer is not None:
            trace.receive(answer(message))

    trace = FetchedTrace(send, "the host", order(here))
    trace.receive(HostTraceStopped())  # nobody has asked
    problems = await trace.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert problems[0] == "the host: The disk was full."
    if left:
        [_, sentence] = problems
        assert sentence.startswith("the host: It said what it was not asked; ")
        assert [path.stat().st_size for path in here.iterdir()] == [0]
    else:
        assert len(problems) == 1
        assert list(here.iterdir()) == []
        assert len(asked) == 2


async def test_a_directory_of_the_router_that_cannot_be_written(tmp_path: Path) -> None:
    there = control(tmp_path / "host")
    async with Host(ScriptedEndpoint(), tracing=there) as host:
        client = await host.dial()
        [problem] = await client.start_trace(order(tmp_path / "none")).stop()
        assert problem.endswith("Its fragments cannot be written here (No such file or directory).")
        await client.close()
