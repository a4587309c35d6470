from __future__ import annotations

import ctypes
import json
import mmap
import os
from pathlib import Path

from pagoda.checkpoints.read_ahead import read_ahead

SIZE = 2**20


def _write(path: Path) -> Path:
    path.write_bytes(os.urandom(SIZE))
    return path


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache, by mincore(2)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        held = ctypes.c_char.from_buffer(memory)
        count = SIZE // mmap.PAGESIZE
        present = (ctypes.c_ubyte * count)()
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(held))
        assert libc.mincore(address, ctypes.c_size_t(SIZE), present) == 0
        del held
        return sum(page & 1 for page in present)


def test_all_files_are_read(tmp_path: Path) -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": {f"tensor.{i}": name for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    parts = [_write(tmp_path / f"some-0000{i}-of-00002.gguf") for i in (1, 2)]
    other = _write(tmp_path / "other.gguf")
    for part in (*parts, other):
        part.write_bytes(b"GGUF" + part.read_bytes()[4:])
    files = [_write(tmp_path / name) for name in names]
    for model, read, left in ((tmp_path, files, parts), (parts[0], parts, [other])):
        for path in (*files, *parts, other):
            _forget(path)
        unread = sum(map(_cached_pages, left))
        thread = read_ahead(str(model), available_bytes=4 * SIZE)
        assert thread is not None
        thread.join()
        assert [_cached_pages(path) for path in read] == [SIZE // mmap.PAGESIZE] * 2
        assert sum(map(_cached_pages, left)) == unread


def test_files_that_memory_does_not_hold_are_left_to_the_loader(tmp_path: Path) -> None:
    _write(tmp_path / "model.safetensors")
    assert read_ahead(str(tmp_path), available_bytes=2 * SIZE - 1) is None


def test_there_may_be_nothing_to_read(tmp_path: Path) -> None:
    assert read_ahead(str(tmp_path)) is None
    assert read_ahead("pagoda-tiny") is None
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert read_ahead(str(tmp_path)) is None
