"""Children and parents as real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from pagoda.ipc.lifeline import ChildProcess

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
