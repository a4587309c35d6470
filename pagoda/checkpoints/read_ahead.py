"""Weights are read from disk while a worker that will load them is still starting."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from pagoda.checkpoints.checkpoint import weight_files
from pagoda.checkpoints.gguf.reader import SUFFIX, is_gguf, model_name
from pagoda.errors import ConfigError
from pagoda.ipc.machine import available_memory_bytes

_PIECE = 2**28
"""Bytes of one system call."""


def read_ahead(model: str, available_bytes: int | None = None) -> threading.Thread | None:
    """Starts to read the files of `model`, a directory or a GGUF file, into the page cache, in their order.

    Returns the thread that does; None for a model without files, and where they would take more than half of the
    memory that is available: what is read first would be gone before it is used. The loader says what is wrong
    with files.
    """
    paths = _files(Path(model))
    if available_bytes is None:
        available_bytes = available_memory_bytes()
    if not paths or 2 * sum(path.stat().st_size for path in paths) > available_bytes:
        return None
    thread = threading.Thread(target=_read, args=(paths,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _files(model: Path) -> Sequence[Path]:
    if is_gguf(model):
        others = model.parent.glob(f"{model_name(model)}-*-of-*{SUFFIX}")
        return sorted({model, *others})
    try:
        return weight_files(model)
    except ConfigError:
        return ()


def _read(paths: Sequence[Path]) -> None:
    """Copies nothing, and holds neither the interpreter nor the memory map, which the process needs meanwhile."""
    with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
        for path in paths:
            with path.open("rb") as file:
                start = 0
                while sent := os.sendfile(nowhere.fileno(), file.fileno(), start, _PIECE):
                    start += sent
