# SPDX-License-Identifier: Apache-2.0
"""Directories of objects that are small, read-only or full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from disk_rig import DiskRig
from kv_tiers import mount, mounted
from small_objects import small_manifest

from pagoda.plugins.disk_tier.objects import Manifest, ObjectFiles, open_directory


@pytest.fixture
def manifest() -> Manifest:
    return small_manifest()


@pytest.fixture
def files(tmp_path: Path, manifest: Manifest) -> ObjectFiles:
    return ObjectFiles(open_directory(tmp_path / "kv", manifest), manifest)


@pytest.fixture
def rig() -> DiskRig:
    return DiskRig()


@pytest.fixture
def read_only() -> Callable[[Path], AbstractContextManager[None]]:
    """Makes a directory that nobody can write in; for root, who may write anywhere, by a mount."""
    return _read_only_mount if os.geteuid() == 0 else _without_permission


@contextlib.contextmanager
def _without_permission(directory: Path) -> Iterator[None]:
    everything = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    for path in everything:
        path.chmod(0o500)
    try:
        yield
    finally:
        for path in everything:
            path.chmod(0o700)


@contextlib.contextmanager
def _read_only_mount(directory: Path) -> Iterator[None]:
    with mounted(directory, "--bind", str(directory)):
        mount("-o", "remount,ro,bind", str(directory))
        yield
