from __future__ import annotations

import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from pagoda.ipc.rundir import RuntimeDirectory


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_nobody_else_may_enter_and_close_removes_it() -> None:
    directory = RuntimeDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.address("engine") == f"ipc://{directory.path}/engine"
    directory.close()
    assert not directory.path.exists()
    directory.close()


def test_directories_of_ended_processes_are_swept_and_those_of_others_left(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / f"pagoda-{ended.pid}-left").mkdir()
    (tmp_path / "pagoda-notes").mkdir()
    first = RuntimeDirectory()
    second = RuntimeDirectory()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"pagoda-notes", first.path.name, second.path.name}
