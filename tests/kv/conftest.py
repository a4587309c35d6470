"""Directories of objects that are small, read-only or full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pagoda.kv.objects import Manifest, ObjectFiles, open_directory


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        model="some-model",
        model_digest="5eed",
        dtype="float32",
        kv_dtype="float32",
        quantization="none",
        arithmetic="cpu (avx512)",
        layout="layer, side, head, token, element",
        block_size=16,
        payload_bytes=10_000,
    )


@pytest.fixture
def files(tmp_path: Path, manifest: Manifest) -> ObjectFiles:
    return ObjectFiles(open_directory(tmp_path / "kv", manifest), manifest)


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
    _mount("--bind", str(directory), str(directory))
    try:
        _mount("-o", "remount,ro,bind", str(directory))
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    directory = tmp_path / "disk"
    directory.mkdir()
    _mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory))
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _mount(*arguments: str) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"root may not mount here: {done.stderr.strip()}")
