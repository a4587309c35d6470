# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.plugins.disk_tier.directory import check_kv_directory

NOBODY = 65534


def test_a_directory_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_kv_directory("a/b", 1, "m") == str(tmp_path / "a" / "b")
    assert check_kv_directory("~/kv", 1, "m") == str(tmp_path / "kv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("", r"^--kv-disk-path must be a directory, got ''"),
        ("a\0b", r"^--kv-disk-path must be a directory, got 'a"),
        *((f"file{below}", r"must be a directory, but .*file is a file\.$") for below in ("", "/kv")),
        *((path, r"lies in the model's directory; name another\.$") for path in ("model", "model/kv", "link/kv")),
    ],
)  # fmt: skip
def test_what_is_no_place_for_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("link").symlink_to("model")
    Path("file").touch()
    with pytest.raises(ConfigError, match=sentence):
        check_kv_directory(path, 1, "model")


@pytest.mark.parametrize("below", ["", "kv"])
def test_permission_is_asked_for_before_anything_starts(tmp_path: Path, below: str) -> None:
    """Root may do anything, and is somebody else meanwhile."""
    locked, own = tmp_path / "locked", os.geteuid()
    locked.mkdir(mode=0o500)
    try:
        os.seteuid(own or NOBODY)
        with pytest.raises(
            ConfigError, match=r"cannot be used: this user may not read and write /"
        ):
            check_kv_directory(str(locked / below), 1, "m")
    finally:
        os.seteuid(own)


def test_blocks_may_lie_beside_a_model_and_take_no_more_than_the_disk(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert check_kv_directory(str(tmp_path), 1, str(model)) == str(tmp_path)
    assert check_kv_directory(f"{model}-kv", 1, str(model)) == f"{model}-kv"
    with pytest.raises(ConfigError, match=r"^--kv-disk-bytes .* is more than the .*; lower it"):
        check_kv_directory(str(tmp_path / "kv"), 2**60, "m")
