# SPDX-License-Identifier: Apache-2.0
"""Flags for the directory of clients' files and batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pagoda.cli.options import SERVER, bytes_of
from pagoda.files import check_quota
from pagoda.plugins.batches.directory import files_directory
from pagoda.plugins.batches.files import DEFAULT_MAX_BYTES
from pagoda.plugins.batches.state import FilesDirectory


@Parameter(name="*", group=SERVER)
@dataclass(frozen=True, kw_only=True)
class FilesFlags:
    """Files of clients."""

    files_dir: Path | None = None
    """A directory for files that clients upload and for batches, which go on after a restart; by default a
    temporary one of at most 1 GiB, which ends with the server."""
    files_max_bytes: Annotated[int | str, Parameter(metavar="INT")] = "16GiB"
    """The most that all files in --files-dir may take, such as 100GiB; uploads beyond are refused."""

    @contextmanager
    def opened(self) -> Iterator[FilesDirectory]:
        """Gives the directory while a server runs. Raises ConfigError: a flag has an impossible value."""
        max_bytes = bytes_of("--files-max-bytes", self.files_max_bytes)
        if self.files_dir is not None and max_bytes != DEFAULT_MAX_BYTES:
            check_quota(self.files_dir, max_bytes, "--files-max-bytes")
        with files_directory(self.files_dir, max_bytes) as (path, most):
            yield FilesDirectory(path, most)
