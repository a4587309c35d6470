# SPDX-License-Identifier: Apache-2.0
"""Files and batches of one server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagoda.api.plugin import ApiPlugin, LineForm
from pagoda.api.service import Service
from pagoda.plugins.batches.files import DEFAULT_MAX_BYTES, FileStore
from pagoda.plugins.batches.runner import BatchRunner


@dataclass(frozen=True)
class FilesDirectory:
    """The directory of clients' files and batches."""

    path: Path | None
    """None where no such directory can be made."""
    max_bytes: int
    """Bytes of all files together."""


class BatchState:
    """The files of a directory and the batches in it."""

    def __init__(self, service: Service, plugins: Mapping[str, ApiPlugin]) -> None:
        """Raises ConfigError: the directory cannot be used, or a batch in it cannot be read."""
        self.files: FileStore | None = None
        """None without a directory."""
        self.batches: BatchRunner | None = None
        self._service = service
        self._forms: dict[str, LineForm] = {}
        for plugin in plugins.values():
            self._forms |= plugin.line_forms
        directory = service.config.option(FilesDirectory)
        if directory is not None and directory.path is not None:
            self.open(directory.path, directory.max_bytes)

    def open(self, path: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> BatchRunner:
        """Serves the files and batches of a directory. Raises ConfigError: as the constructor."""
        self.files = FileStore(path, max_bytes)
        self.batches = BatchRunner(self._service, self.files, self._forms)
        return self.batches

    def start(self) -> None:
        if self.batches is not None:
            self.batches.start()

    async def stop(self) -> None:
        """Ends the work on batches, which goes on when the server is started again."""
        if self.batches is not None:
            await self.batches.close()
        if self.files is not None:
            self.files.close()

    async def close(self) -> None:
        """All work has ended in `stop`."""
