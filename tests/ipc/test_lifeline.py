# SPDX-License-Identifier: Apache-2.0
"""Children and parents as real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from pagoda.ipc.lifeline import ChildProcess, count_oom_kills

CHILD = "lifeline_child"


@pytest.fixture(autouse=True)
def _child_module_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))


def wait_for_end(child: ChildProcess) -> None:
    readable, _, _ = select.select([child], [], [], 20)
    assert readable, "the child's end was not noticed"


def test_the_child_reads_its_configuration() -> None:
    child = ChildProcess(CHILD, ["exit-with-input"], config=b"7")
    wait_for_end(child)
    assert child.describe_end() == "exited with code 7"
    child.close()


def test_a_killed_child_is_noticed_at_once() -> None:
    child = ChildProcess(CHILD, ["sleep"])
    assert child.is_alive()
    os.kill(child.pid, signal.SIGKILL)
    wait_for_end(child)
    assert child.describe_end() == "was killed by SIGKILL"
    child.close()


@pytest.mark.parametrize(
    ("number", "oom_kills", "is_from_outside"),
    [
        (signal.SIGKILL, (3, 3), True),
        (signal.SIGKILL, (3, 4), False),
        (signal.SIGKILL, (None, None), False),
        (signal.SIGTERM, (3, 4), True),
        (signal.SIGSEGV, (3, 3), False),
    ],
)
def test_signals_from_outside_are_told_from_those_that_a_request_may_cause(
    number: int,
    oom_kills: tuple[int | None, int | None],
    is_from_outside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = iter(oom_kills)
    monkeypatch.setattr("pagoda.ipc.lifeline.count_oom_kills", lambda: next(counts))
    child = ChildProcess("timeit", ["-n1", "-r1", "-s", "import time", "time.sleep(600)"])
    os.kill(child.pid, number)
    wait_for_end(child)
    child.describe_end()
    assert child.was_ended_from_outside() is is_from_outside


def test_a_stopped_child_is_told_from_one_that_runs() -> None:
    child = ChildProcess(CHILD, ["sleep"])
    assert not child.is_stopped()
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert child.is_stopped()
    child.kill()
    assert not child.is_stopped()


def test_the_kernel_tells_how_many_processes_it_killed_for_memory() -> None:
    assert count_oom_kills() is not None


def test_closing_ends_the_child_and_may_be_repeated() -> None:
    child = ChildProcess(CHILD, ["sleep"])
    child.close()
    assert not child.is_alive()
    child.close()


def test_a_killed_child_that_stays_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stuck in the kernel ends when it can; the parent serves meanwhile."""
    child = ChildProcess("timeit", ["-n1", "-r1", "-s", "import time", "time.sleep(600)"])
    with monkeypatch.context() as stuck:
        stuck.setattr(subprocess.Popen, "kill", lambda _self: None)
        stuck.setattr("pagoda.ipc.lifeline.REAP_S", 0.01)
        child.kill()
        assert child.is_alive()
    os.kill(child.pid, signal.SIGKILL)
    assert child.describe_end() == "was killed by SIGKILL"


def test_children_and_grandchildren_end_when_the_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", CHILD, "parent"],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()), int(parent.stdout.readline())]
    descriptors = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.wait()
    for descriptor in descriptors:
        readable, _, _ = select.select([descriptor], [], [], 20)
        assert readable, "a descendant outlived its parent"
        os.close(descriptor)
    parent.stdout.close()


def test_a_child_leaves_sigint_and_sigterm_to_its_parent() -> None:
    child = ChildProcess(CHILD, ["signals"])
    wait_for_end(child)
    assert child.describe_end() == "exited with code 0"
    child.close()
