# SPDX-License-Identifier: Apache-2.0
"""The directory of clients' files: the operator's, or one that ends with the server."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pagoda.plugins.batches.directory import MAX_TEMPORARY_BYTES, files_directory


def test_the_operators_directory_stays(tmp_path: Path) -> None:
    with files_directory(tmp_path, 2**40) as found:
        assert found == (tmp_path, 2**40)
    assert tmp_path.is_dir()


def test_a_temporary_directory_ends_with_the_server() -> None:
    with files_directory(None, 2**40) as (directory, most):
        assert directory is not None
        assert directory.stat().st_mode & 0o777 == 0o700
        assert most == MAX_TEMPORARY_BYTES
        (directory / "file-1.data").write_bytes(b"prompt")
    assert not directory.exists()
    with files_directory(None, 5) as (_, most):
        assert most == 5


def test_without_a_place_for_it_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with files_directory(None, 2**40) as found:
        assert found == (None, 0)
