# SPDX-License-Identifier: Apache-2.0
"""Each action of a schedule, once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from pagoda.faults.injector import FaultPlan, FaultPoint, Faults, InjectedFaultError, instance
from pagoda.ipc.clock import VirtualClock

SCRIPT = """
import sys
from pagoda.faults.injector import FaultPlan, Faults
print(Faults(FaultPlan(sys.argv[1])).before("engine.turn", lambda: "went on")(), flush=True)
"""


def point(schedule: str) -> FaultPoint:
    found = Faults(FaultPlan(schedule)).point(schedule.partition(":")[0])
    assert found is not None
    return found


def test_a_point_without_faults_leaves_functions_as_they_are() -> None:
    faults, clock = Faults(FaultPlan("worker.step:kill")), VirtualClock()
    for none in (faults, Faults(None)):
        assert none.point("engine.turn") is None
        assert none.before("engine.turn", os.getpid) is os.getpid
        assert none.messages("engine.plan", os.close) is os.close
        assert none.buffers("disk.read", os.close) is os.close
        assert none.clock("engine.clock", clock) is clock


def test_instances() -> None:
    plan = FaultPlan("worker[2].step:raise")
    assert Faults(plan).point("worker.step") is None
    second = Faults(instance(plan, 2)).point("worker.step")
    assert second is not None
    with pytest.raises(InjectedFaultError):
        second.hit()


def test_subjects_are_counted_by_themselves() -> None:
    found = point("worker.step:raise~poison@2")
    for subjects in (["a"], ["poison-1"], ["b"]):
        assert found.hit(subjects) == set()
    with pytest.raises(InjectedFaultError):
        found.hit(["a", "poison-1"])


@pytest.mark.parametrize(
    ("action", "number"), [("kill", signal.SIGKILL), ("crash", signal.SIGSEGV)]
)
def test_signals_that_end_the_process(action: str, number: signal.Signals) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, f"engine.turn:{action}"], check=False)
    assert ended.returncode == -number


def test_stop() -> None:
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, "engine.turn:stop"], stdout=-1)
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.kill(child.pid, signal.SIGCONT)
        assert child.communicate()[0] == b"went on\n"
    finally:
        child.kill()


def test_hang_and_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    monkeypatch.setattr(threading.Event, "wait", lambda *_: waits.append("for ever"))
    monkeypatch.setattr("time.sleep", waits.append)
    point("worker.load:hang").hit()
    point("worker.load:slow=0.25").hit()
    assert waits == ["for ever", 0.25]


@pytest.mark.parametrize(
    ("schedule", "error"),
    [
        ("worker.step:raise", InjectedFaultError),
        ("worker.step:oom", MemoryError),
        ("disk.write:enospc", OSError),
        ("disk.write:eio", OSError),
        ("disk.write:erofs", OSError),
    ],
)
def test_errors(schedule: str, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        point(schedule).hit()
    if isinstance(raised.value, OSError):
        assert raised.value.errno == getattr(errno, schedule.partition(":")[2].upper())


def test_nan_is_left_to_the_caller() -> None:
    assert point("worker.logits:nan").hit(["r1"]) == {"nan"}
    assert point("worker.logits:inf").hit(["r1"]) == {"inf"}


@pytest.mark.parametrize(
    ("fault", "arrived"),
    [
        ("drop@2", b"acd"),
        ("double@2", b"abbcd"),
        ("reorder@2", b"acbd"),
        ("corrupt@2", b"a\x9dcd"),
    ],
)
def test_messages(fault: str, arrived: bytes) -> None:
    came: list[tuple[str, bytes]] = []
    faults = Faults(FaultPlan(f"engine.plan:{fault}"))
    send: Callable[[str, bytes], None] = faults.messages(
        "engine.plan", lambda to, payload: came.append((to, payload))
    )
    for payload in (b"a", b"b", b"c", b"d"):
        send("worker", payload)
    assert b"".join(payload for _, payload in came) == arrived
    assert {to for to, _ in came} == {"worker"}


def test_frames_are_damaged_in_the_last_one() -> None:
    came: list[list[bytes]] = []
    Faults(FaultPlan("host.receive:corrupt")).messages("host.receive", came.append)([b"id", b"abc"])
    assert came == [[b"id", b"a\x9dc"]]


def test_buffers_are_damaged_as_they_are_written_and_read() -> None:
    disk: list[bytes] = []
    buffer = memoryview(bytearray(b"abc"))
    faults = Faults(FaultPlan("disk.write:corrupt disk.read:corrupt"))
    write: Callable[[memoryview], None] = faults.buffers(
        "disk.write", lambda it: disk.append(bytes(it))
    )
    write(buffer)
    assert disk == [b"a\x9dc"]
    assert bytes(buffer) == b"abc"

    def fill(into: memoryview) -> None:
        into[:] = b"xyz"

    faults.buffers("disk.read", fill)(buffer)
    assert bytes(buffer) == b"x\x86z"


def test_a_clock_jumps_ahead_once() -> None:
    clock = VirtualClock()
    jumping = Faults(FaultPlan("engine.clock:jump=60@2")).clock("engine.clock", clock)
    assert [jumping.now() for _ in range(3)] == [0.0, 60.0, 60.0]
