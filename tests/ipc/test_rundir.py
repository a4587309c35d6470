# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.ipc.rundir import RuntimeDirectory, socket_address

MAKE_ONE_AND_DIE = """
import os, sys
from pagoda.ipc import rundir
if "alone" in sys.argv:
    rundir._remove_at_end = lambda path: None
directory = rundir.RuntimeDirectory()
for name in ("a", "with space", "zz") if "full" in sys.argv else ():
    (directory.path / name).touch()
print(directory.path, flush=True)
os._exit(1)
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """With a short name: pytest's own are too long for sockets after many runs."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_nobody_else_may_enter_and_close_removes_it() -> None:
    open_files = os.listdir("/proc/self/fd")
    directory = RuntimeDirectory()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert socket_address(directory.path, "engine") == f"ipc://{directory.path}/engine"
    directory.close()
    assert not directory.path.exists()
    directory.close()
    assert os.listdir("/proc/self/fd") == open_files


def made_and_left(*arguments: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", MAKE_ONE_AND_DIE, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return Path(done.stdout.strip())


def test_the_directory_of_a_process_that_is_killed_goes_with_it() -> None:
    left = made_and_left()
    while left.exists():
        time.sleep(0.01)


def test_empty_directories_whose_lock_is_gone_are_swept_once_they_are_old(tmp_path: Path) -> None:
    """Their processes were killed before they made the lock, or after they removed it."""
    old, young, full = (tmp_path / f"pagoda-abcd_{number:03}" for number in range(3))
    for path in (old, young, full):
        path.mkdir()
    (full / "of somebody else").touch()
    for path in (old, full):
        os.utime(path, (0, 0))
    RuntimeDirectory().close()
    assert {path.name for path in tmp_path.iterdir()} == {young.name, full.name}


def test_the_lock_is_removed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a directory whose removal is broken off is swept by the next server."""
    directory = RuntimeDirectory()
    (directory.path / "folder").mkdir()
    for name in ("a", "engine", "zz", "folder/file"):
        (directory.path / name).touch()

    def stay(path: Path, ignore_errors: bool) -> None:
        left.append(sorted(it.name for it in path.rglob("*")))
        real(path, ignore_errors)

    left: list[list[str]] = []
    real = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", stay)
    directory.close()
    assert left == [["file"], ["lock"]]


def test_the_shell_removes_the_lock_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "rm").write_text(f'#!/bin/sh\necho "$3" >> {told}\n')
    (tools / "rm").chmod(0o700)
    monkeypatch.setenv("PATH", str(tools))
    left = made_and_left("full")
    asked: list[str] = []
    while str(left) not in asked:
        asked = told.read_text().splitlines() if told.exists() else []
        time.sleep(0.01)
    assert sorted(asked[:-1]) == sorted(str(left / name) for name in ("a", "with space", "zz"))
    assert (left / "lock").exists()


def test_directories_of_ended_processes_are_swept_and_those_of_others_left(tmp_path: Path) -> None:
    left = made_and_left("alone")
    assert left.parent == tmp_path
    assert left.exists()
    (tmp_path / "pagoda-notes").mkdir()
    first = RuntimeDirectory()
    second = RuntimeDirectory()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"pagoda-notes", first.path.name, second.path.name}
    first.close()
    second.close()


def test_only_runtime_directories_of_this_user_are_swept(tmp_path: Path) -> None:
    """A link that somebody else put there leads to a directory with a lock; so does one in a directory of ours."""
    precious = tmp_path / "precious"
    (precious / "sub").mkdir(parents=True)
    for name in ("lock", "data", "sub/more"):
        (precious / name).touch()
    (tmp_path / "pagoda-abcdefgh").symlink_to(precious)
    files = tmp_path / "pagoda-files"
    files.mkdir()
    (files / "lock").touch()
    lured = tmp_path / "pagoda-ijklmnop"
    lured.mkdir()
    (lured / "lock").symlink_to(precious / "data")
    (lured / "kept").touch()
    os.mkfifo(tmp_path / "pagoda-qrstuvwx")
    RuntimeDirectory().close()
    assert sorted(str(path.relative_to(precious)) for path in precious.rglob("*")) == [
        "data",
        "lock",
        "sub",
        "sub/more",
    ]
    assert (files / "lock").exists()
    assert (lured / "kept").exists()
