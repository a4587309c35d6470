# SPDX-License-Identifier: Apache-2.0
"""Batches and their states, each in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from pagoda.errors import ConfigError
from pagoda.plugins.batches.files import write_record
from pagoda.plugins.batches.lines import BatchFault

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
UNFINISHED = frozenset(("validating", "in_progress", "finalizing", "cancelling"))
WINDOW_S = 24 * 3600


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, as its client sees it but for the last fields."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    counts: Counts = msgspec.field(default_factory=Counts)
    faults: list[BatchFault] = []
    times: dict[str, int] = {}
    """Time of the beginning of each state, by its name."""
    output_id: str
    error_id: str
    """Ids of the files of results, known before the files are."""
    has_output: bool = False
    has_errors: bool = False
    key_name: str = ""

    @property
    def is_finished(self) -> bool:
        return self.status not in UNFINISHED

    def shown(self) -> dict[str, object]:
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
        faults = {"object": "list", "data": self.faults} if self.faults else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": faults,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in (*names, "cancelled")},
            "request_counts": self.counts,
            "metadata": self.metadata,
        }


def read_batches(directory: Path) -> dict[str, BatchRecord]:
    """All batches of a directory. Raises ConfigError: one cannot be read."""
    found = {}
    try:
        for path in sorted(directory.glob("batch-*.json")):
            record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
            found[record.id] = record
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--files-dir: {str(directory)!r} cannot be read: {error}.") from None
    return found


def write_batch(directory: Path, record: BatchRecord) -> None:
    write_record(directory / f"{record.id}.json", record)


def remove_batch(directory: Path, record: BatchRecord) -> None:
    """Removes the description of a batch; its results are files of their own."""
    (directory / f"{record.id}.json").unlink(missing_ok=True)
