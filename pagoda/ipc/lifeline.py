# SPDX-License-Identifier: Apache-2.0
"""Child processes that never outlive their parent, and parents that notice a dead child at once.

Parent and child hold the two ends of one socket pair and never write to it: when either ends, the other reads
end-of-file. On Linux the kernel also kills the child (`PR_SET_PDEATHSIG`), in case it is stuck in native code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

LIFELINE_ENV = "PAGODA_LIFELINE_FD"
REAP_S = 5.0
"""Seconds for which a parent waits for a killed child: one that is stuck in the kernel may stay for ever."""
_PR_SET_PDEATHSIG = 1
_SIGNALS_OF_PEOPLE = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class ChildProcess:
    """A Python module run as a process that ends when this one does.

    `fileno()` becomes readable when the child has ended, so the object itself can be put into a poller.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        config: bytes = b"",
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        """Starts `python -m module arguments...`; the child reads `config` from its standard input.

        `stdout` and `stderr` are file descriptors that take its output, instead of this process's own.

        Must be called from a thread that lives as long as the child may: on Linux the child is killed when
        the thread that started it ends.
        """
        self._oom_kills = count_oom_kills()
        self._lifeline, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[child_end.fileno()],
                env={**os.environ, LIFELINE_ENV: str(child_end.fileno())},
            )
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(config)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._lifeline.fileno()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def describe_end(self) -> str:
        """Waits for the end of the child; returns `was killed by SIGKILL`, `exited with code 1` or the like."""
        code = self._process.wait()
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def was_killed(self) -> bool:
        return (self._process.poll() or 0) < 0

    def was_ended_from_outside(self) -> bool:
        """True if the child got a signal that only a person or another program sends. SIGKILL counts if the
        kernel has killed no process for want of memory since the child was started."""
        number = -(self._process.poll() or 0)
        if number == signal.SIGKILL:
            return self._oom_kills is not None and count_oom_kills() == self._oom_kills
        return number in _SIGNALS_OF_PEOPLE

    def is_stopped(self) -> bool:
        """True if the child was stopped by SIGSTOP, Ctrl-Z or a debugger. Always False without `/proc`."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
            return stat.rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the child: hangs up, waits, and kills it if it stays. Leaves no zombie. May be called twice."""
        self._lifeline.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the child with SIGKILL, and waits for `REAP_S` at most. May be called twice."""
        Reaper([self]).close()


class Reaper(threading.Thread):
    """Ends children with SIGKILL, all at once, and waits until they are gone, or for `REAP_S`.

    `fileno()` becomes readable then. The interpreter waits for the thread before it exits.
    """

    def __init__(self, children: Collection[ChildProcess]) -> None:
        super().__init__(name="reaper")
        self._processes = [child._process for child in children]
        for process in self._processes:
            process.kill()
        for child in children:
            child._lifeline.close()
        self._bell, self._ringer = socket.socketpair()
        self.start()

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self) -> None:
        """Waits until that."""
        self.join()
        self._bell.close()

    def run(self) -> None:
        deadline = time.monotonic() + REAP_S
        with self._ringer:
            for process in self._processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    threading.Thread(target=process.wait, name="reaper", daemon=True).start()


def count_oom_kills() -> int | None:
    """Processes that the kernel has killed for want of memory since the machine was started; None if it does not
    tell (`oom_kill` of `/proc/vmstat`, Linux 4.13)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def hold_lifeline() -> None:
    """Ends this process when its parent ends. A child's main calls this first.

    SIGINT and SIGTERM are left to the parent, which decides when its children end: a terminal and a service
    manager send them to the whole group, and answers that still run must be finished first.
    Does nothing in a process that was not started by `ChildProcess`.
    """
    fd = os.environ.pop(LIFELINE_ENV, None)
    if fd is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    lifeline = socket.socket(fileno=int(fd))
    lifeline.set_inheritable(False)
    threading.Thread(target=_exit_at_hangup, args=(lifeline,), name="lifeline", daemon=True).start()


def _exit_at_hangup(lifeline: socket.socket) -> None:
    with contextlib.suppress(OSError):
        lifeline.recv(1)
    os._exit(0)
