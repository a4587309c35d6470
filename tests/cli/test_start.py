# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import resource
import subprocess
import sys
import types

import pytest

from pagoda.cli import start


class _Interrupted(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_an_interrupt_while_modules_are_imported_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pagoda.cli.main", _Interrupted("pagoda.cli.main"))
    assert start.main() == 130
    assert capsys.readouterr() == ("", "")


def test_what_is_imported_before_is_quick() -> None:
    code = (
        "import pagoda.cli.start, sys; print('cyclopts' in sys.modules, 'asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


@pytest.mark.parametrize("most_files", [8, 16, 31])
def test_too_few_files_are_told_in_one_sentence(most_files: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))

    command = [sys.executable, "-m", "pagoda", "serve", "--executor", "sim", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"pagoda: This process may open {most_files} files and needs 32; let it open more (ulimit -n 1024).\n"
    )
