# SPDX-License-Identifier: Apache-2.0
"""The directory of clients' files and batches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_TEMPORARY_BYTES = 2**30
"""Bytes of all files of a server whose operator names no directory."""


@contextmanager
def files_directory(given: Path | None, max_bytes: int) -> Iterator[tuple[Path | None, int]]:
    """The operator's directory with the most bytes of it, or a temporary one that ends with the server and has
    less room; None where no such directory can be made."""
    if given is not None:
        yield given, max_bytes
        return
    try:
        made = tempfile.TemporaryDirectory(prefix="pagoda-files-", ignore_cleanup_errors=True)
    except OSError:
        yield None, 0
        return
    with made as path:
        yield Path(path), min(max_bytes, MAX_TEMPORARY_BYTES)
