# SPDX-License-Identifier: Apache-2.0
"""`pagoda chat` at a real terminal: figures behind answers, and what Ctrl-C does."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PATIENCE_S = 5.0
_SILENCE_S = 80.0
"""A command that shows nothing for this long hangs."""


class _Terminal:
    """A pseudo-terminal with a command running in it."""

    def __init__(self, arguments: list[str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"  # no control sequences beside what is said
            os.execv(sys.executable, [sys.executable, "-m", "pagoda", *arguments])
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Reads until `text` is shown; what came before it is dropped."""
        while text not in self.shown:
            self._read()
        self.shown = self.shown.partition(text)[2]

    def wait_for_anything(self) -> None:
        """Reads until something is shown behind what was waited for last."""
        while not self.shown:
            self._read()

    def _read(self) -> None:
        if not select.select([self._fd], [], [], _SILENCE_S)[0]:
            raise AssertionError(f"the command says nothing more after {self.shown!r}")
        try:
            self.shown += os.read(self._fd, 4096).decode(errors="replace")
        except OSError as error:
            raise AssertionError(f"the command ended after showing {self.shown!r}") from error

    def end(self, *, interrupting: bool = False) -> int:
        """Reads until the command hangs up; returns its exit code.

        `interrupting` types Ctrl-C, and again if nothing comes of it: between showing a prompt and
        reading the answer, Python's readline may miss a signal.
        """
        try:
            if interrupting:
                self.type("\x03")
            while True:
                while interrupting and not select.select([self._fd], [], [], _PATIENCE_S)[0]:
                    self.type("\x03")
                self.shown += os.read(self._fd, 4096).decode(errors="replace")
        except OSError:
            os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def _chat(model: Path, *arguments: str) -> Iterator[_Terminal]:
    """`pagoda chat` at its first prompt; killed if the test fails."""
    flags = ["--load-format", "dummy", "--threads", "1", "--seed", "1", *arguments]
    terminal = _Terminal(["chat", str(model), *flags])
    try:
        terminal.wait_for("> ")
        yield terminal
    except BaseException:
        os.kill(terminal.pid, signal.SIGKILL)
        raise


@pytest.fixture(scope="module")
def talkative_model(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dummy model with a context of 128 Ki tokens."""
    directory = tmp_path_factory.mktemp("models") / "talkative"
    shutil.copytree(dummy_model, directory)
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = 2**17
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_ctrl_c_stops_an_answer_and_then_the_chat(talkative_model: Path) -> None:
    """An answer of 100,000 tokens cannot end before Ctrl-C: no terminal takes that much before it is read."""
    flags = ["--kv-cache-memory-bytes", "40MiB", "--max-tokens", "100000"]
    with _chat(talkative_model, *flags) as terminal:
        for question in ("hello", "again"):
            terminal.type(f"{question}\r")
            terminal.wait_for(f"{question}\r\n")
            terminal.wait_for_anything()
            terminal.type("\x03")
            terminal.wait_for("^C")
            terminal.wait_for("> ")
            terminal.type("/help\r")
            terminal.wait_for("Ctrl-C stops an answer.")
            terminal.wait_for("> ")
        code = terminal.end(interrupting=True)
    assert code == 130
    assert "Traceback" not in terminal.shown


def test_figures_stand_behind_an_answer_and_ctrl_d_leaves(dummy_model: Path) -> None:
    with _chat(dummy_model, "--kv-cache-memory-bytes", "4MiB", "--max-tokens", "5") as terminal:
        terminal.type("hello\r")
        terminal.wait_for("tokens/s]")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
