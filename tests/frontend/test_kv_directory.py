"""Directories for KV blocks are judged before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.frontend.engine_options import check_kv_directory

NOBODY = 65534


def test_a_directory_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_kv_directory("a/b", 1, "m") == str(tmp_path / "a" / "b")
    assert check_kv_directory("~/kv", 1, "m") == str(tmp_path / "kv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-disk-path must be a directory, got '"):
        check_kv_directory(path, 1, "m")


@pytest.mark.parametrize("below", ["", "/kv"])
def test_a_file_is_no_directory(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"must be a directory, but {file} is a file"):
        check_kv_directory(f"{file}{below}", 1, "m")


def test_a_models_directory_stays_as_it_is(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "link").symlink_to(model)
    for path in (model, model / "kv", tmp_path / "link" / "kv"):
        with pytest.raises(ConfigError, match=r"lies in the model's directory; name another\.$"):
            check_kv_directory(str(path), 1, str(model))
    assert check_kv_directory(str(tmp_path), 1, str(model)) == str(tmp_path)
    assert check_kv_directory(f"{model}-kv", 1, str(model)) == f"{model}-kv"


def test_a_quota_is_no_larger_than_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-disk-bytes .* is more than the .*; lower it\.$"):
        check_kv_directory(str(tmp_path / "kv"), 2**60, "m")


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A directory that is closed to this user; root may do anything, and is somebody else meanwhile."""
    directory = tmp_path / "locked"
    directory.mkdir(mode=0o500)
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOBODY)
    yield directory
    os.seteuid(own)
    directory.chmod(0o700)


@pytest.mark.parametrize("below", ["", "kv"])
def test_permission_is_asked_for_before_anything_starts(locked: Path, below: str) -> None:
    sentence = r"cannot be used: this user may not read and write /"
    with pytest.raises(ConfigError, match=sentence):
        check_kv_directory(str(locked / below), 1, "m")
