# SPDX-License-Identifier: Apache-2.0
"""Blocks between a worker's device and SSD, beside plain files of as many bytes.

The worker's half of the tiers runs in this process, with KV tensors in the shape of a model and no weights. It
writes blocks to objects and reads them back, as threads of a worker do, checksums included. The plain copies write
and read files of the length of an object, with `O_DIRECT` where the file system takes it, by one thread and by as
many as the worker has. All take turns, so that what else the disk does falls on all alike. Nobody syncs.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.kv_tiers.blocks import Blocks
from pagoda.cli import output
from pagoda.ipc.machine import format_bytes

_Times = dict[tuple[str, str], list[float]]
"""Seconds of each round, by mover of the bytes and direction (written or read)."""
_Move = Callable[[int, list[mmap.mmap], int], int]
"""`os.preadv` or `os.pwritev`."""
_TIER = "worker, blocks and checksums"
_KINDS = ("write", "read")


def bandwidth(
    *,
    directory: Path | None = None,
    model: str = "qwen3-0.6b",
    blocks: int = 600,
    block_size: int = 16,
    repeats: int = 5,
    threads: int = 2,
) -> None:
    """Measure how fast a worker writes blocks to SSD and reads them, beside plain copies.

    Args:
        directory: On the file system to be measured; by default that of temporary files.
        model: The preset in whose shape blocks are, in bfloat16.
        blocks: How many are moved in a round.
        block_size: Tokens in a block.
        repeats: Rounds; medians are shown.
        threads: Of the plain copy with several threads.
    """
    times: _Times = {}
    with tempfile.TemporaryDirectory(dir=directory) as root:
        moved = Blocks(Path(root) / "kv", model, blocks, block_size)
        size = moved.files.object_bytes
        how = "O_DIRECT" if moved.files.direct else "buffered, since it takes no O_DIRECT"
        output.stdout().print(
            f"{blocks} objects of {format_bytes(size)}, {format_bytes(blocks * size)} a round; {how}"
        )
        try:
            for _ in range(repeats):
                for count in dict.fromkeys((1, threads)):
                    place, direct = Path(root) / "plain", moved.files.direct != 0
                    plain = _PlainFiles(place, size, blocks, count, direct)
                    name = f"plain files, {count} {'thread' if count == 1 else 'threads'}"
                    _note(times, name, "write", plain.write)
                    _note(times, name, "read", plain.read)
                    plain.remove()
                _note(times, _TIER, "write", moved.write)
                moved.clear_device()
                _note(times, _TIER, "read", moved.read)
                moved.check_device()
                moved.remove_objects()
        finally:
            moved.close()
    _report(times, blocks * size)


def _note(times: _Times, who: str, kind: str, move: Callable[[], None]) -> None:
    began = time.perf_counter()
    move()
    times.setdefault((who, kind), []).append(time.perf_counter() - began)


def _report(times: _Times, num_bytes: int) -> None:
    speed = {what: num_bytes / statistics.median(seconds) / 1e9 for what, seconds in times.items()}
    rows = []
    for who in dict.fromkeys(who for who, _ in times):
        row = [who]
        for kind in _KINDS:
            row += [f"{speed[who, kind]:.2f} GB/s", f"{speed[_TIER, kind] / speed[who, kind]:.0%}"]
        rows.append(row)
    columns = ("", "write", "the worker's share", "read", "the worker's share")
    output.stdout().print(output.table("", columns, rows))


class _PlainFiles:
    """Files as large as objects, without anything in them that means something."""

    def __init__(self, directory: Path, size: int, count: int, threads: int, direct: bool) -> None:
        self._directory = directory
        self._count = count
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._buffers = [mmap.mmap(-1, size) for _ in range(threads)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(size)
        directory.mkdir()

    def write(self) -> None:
        self._move_all(os.pwritev, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def read(self) -> None:
        self._move_all(os.preadv, os.O_RDONLY)

    def remove(self) -> None:
        shutil.rmtree(self._directory)

    def _move_all(self, move: _Move, flags: int) -> None:
        with ThreadPoolExecutor(len(self._buffers)) as pool:
            parts = [
                pool.submit(self._move_some, first, buffer, move, flags | self._flags)
                for first, buffer in enumerate(self._buffers)
            ]
        for part in parts:
            part.result()

    def _move_some(self, first: int, buffer: mmap.mmap, move: _Move, flags: int) -> None:
        for number in range(first, self._count, len(self._buffers)):
            descriptor = os.open(self._directory / str(number), flags, 0o600)
            try:
                if move(descriptor, [buffer], 0) != len(buffer):
                    raise RuntimeError("The file system took only a part of a file.")
            finally:
                os.close(descriptor)
