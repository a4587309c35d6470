# SPDX-License-Identifier: Apache-2.0
"""Files that clients upload and batches write, each with a description beside it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Literal, TypeVar, cast

import msgspec

from pagoda.api.auth.key_shares import KeyShares
from pagoda.api.errors import ApiError
from pagoda.api.http.under_way import UnderWay
from pagoda.errors import ConfigError, refuse
from pagoda.files import open_private

MAX_UPLOADS = 64
"""Uploads at a time; each has an open file."""
MAX_UPLOADS_OF_KEY = 16
"""Uploads at a time of one API key."""
DEFAULT_MAX_BYTES = 16 * 2**30
"""Bytes of all files together, unless the operator says otherwise."""
MAX_FILES = 10_000
"""Most files at a time; their descriptions are in memory."""
_FLUSH_BYTES = 2**20
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))

T = TypeVar("T")
_log = logging.getLogger("pagoda.api")

Purpose = Literal[
    "batch", "batch_output", "assistants", "fine-tune", "vision", "user_data", "evals"
]


class FileRecord(msgspec.Struct, kw_only=True):
    """The description of a file, as its client sees it but for `key_name`."""

    id: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int
    key_name: str = ""
    """Name of the API key of the request that made the file; requests with other keys do not see it."""

    def shown(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


def new_id(kind: str) -> str:
    """A name that no client can guess."""
    return f"{kind}-{secrets.token_hex(12)}"


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Writes a description, so that after a crash there is the old one or the new one."""
    part = path.with_suffix(".part")
    with open(part, "wb", opener=open_private) as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def sync_file(path: Path) -> int:
    """Waits until a file is on the disk; returns its bytes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


async def _on_disk(work: Callable[[], T]) -> T:
    """The result of work on the disk, done in a thread. Raises ApiError: 507, the disk is full; 500, it fails."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        _log.error("--files-dir cannot be written: %s", error.strerror)
        if error.errno in _FULL:
            raise ApiError(507, "The server's disk for files is full.") from None
        raise ApiError(500, "The server's disk for files fails; its log says more.") from None


def _write_all(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


class FileStore:
    """The files of a directory. Work on the disk is done in threads."""

    def __init__(self, directory: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """`max_bytes` bounds all files together. Results of batches count as they are finished, and are kept also
        where they pass it. Raises ConfigError: the directory cannot be made or read."""
        self.directory = directory
        self._max_bytes = max_bytes
        self._records: dict[str, FileRecord] = {}
        self.uploads = UnderWay("uploads", MAX_UPLOADS, MAX_UPLOADS_OF_KEY)
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (directory / "files.lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in sorted(directory.glob("file-*.json")):
                record = msgspec.json.decode(path.read_bytes(), type=FileRecord)
                self._records[record.id] = record
            for pattern in ("*.upload", "*.part"):  # cut off by the end of a server
                for path in directory.glob(pattern):
                    path.unlink()
            self._bytes, self._counts = KeyShares(), KeyShares()
            """Sizes and numbers of all files, and of uploads that are under way."""
            for record in self._records.values():
                self._bytes.change(record.key_name, record.bytes)
                self._counts.change(record.key_name, 1)
        except BlockingIOError:
            raise ConfigError(f"--files-dir: another server uses {str(directory)!r}.") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"--files-dir: {str(directory)!r} cannot be read: {error}.") from None

    def remove_orphans(self, growing: Collection[str]) -> None:
        """Removes bytes that have no description, which a server left that was killed meanwhile.

        `growing` are the ids of results that get theirs when their batch is finished. Raises ConfigError.
        """
        try:
            for path in self.directory.glob("file-*.data"):
                if path.stem not in self._records and path.stem not in growing:
                    path.unlink()
        except OSError as error:
            raise ConfigError(f"--files-dir: {str(path)!r} cannot be removed: {error}.") from None

    def close(self) -> None:
        """Lets another server use the directory."""
        self._lock.close()

    def data_path(self, file_id: str) -> Path:
        """The path of a file's bytes."""
        return self.directory / f"{file_id}.data"

    def find(self, file_id: str, key_name: str) -> FileRecord | None:
        record = self._records.get(file_id)
        return record if record is not None and record.key_name == key_name else None

    def all_of(self, key_name: str) -> list[FileRecord]:
        """The files of one API key, newest first."""
        found = [record for record in self._records.values() if record.key_name == key_name]
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, and of uploads that are under way."""
        return self._bytes.total

    def check_room(self, param: str, key_name: str, num_bytes: int = 1) -> None:
        """Raises InvalidRequestError: all files, or those of the key, would be larger than they may be; names
        `param`."""
        if not self._bytes.has_room(key_name, self._max_bytes, num_bytes):
            whose = ", and those of a key as many as they leave free" if key_name else ""
            refuse(
                param,
                f"finds no room: all files together may have {self._max_bytes} bytes (--files-max-bytes){whose}; "
                "delete some first",
            )

    async def write(
        self, chunks: AsyncIterator[bytes], max_bytes: int, key_name: str
    ) -> tuple[str, int]:
        """Writes an upload to the disk as it comes; returns its id and its bytes. `add_upload` makes it a file,
        `drop_upload` removes it.
        Raises InvalidRequestError: the upload is longer than `max_bytes`, or there are too many files or bytes."""
        if not self._counts.has_room(key_name, MAX_FILES):
            refuse(
                "file",
                f"would be one of more than {MAX_FILES} files, or one more of your key than it leaves to others; "
                "delete some first",
            )
        self._counts.change(key_name, 1)
        file_id = new_id("file")
        path = self.data_path(file_id).with_suffix(".upload")
        num_bytes = num_counted = 0
        try:
            with await _on_disk(
                partial(open, path, "wb", buffering=0, opener=open_private)
            ) as file:
                held = bytearray()
                async for chunk in chunks:
                    num_bytes += len(chunk)
                    if num_bytes > max_bytes:
                        refuse("file", f"is longer than {max_bytes} bytes")
                    self.check_room("file", key_name, len(chunk))
                    self._bytes.change(key_name, len(chunk))
                    num_counted += len(chunk)
                    held += chunk
                    if len(held) >= _FLUSH_BYTES:
                        await _on_disk(partial(_write_all, cast(FileIO, file), bytes(held)))
                        held.clear()
                await _on_disk(partial(_write_all, cast(FileIO, file), bytes(held)))
        except BaseException:
            self._bytes.change(key_name, -num_counted)
            self._counts.change(key_name, -1)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return file_id, num_bytes

    async def drop_upload(self, file_id: str, num_bytes: int, key_name: str) -> None:
        self._bytes.change(key_name, -num_bytes)
        self._counts.change(key_name, -1)
        await asyncio.to_thread(
            self.data_path(file_id).with_suffix(".upload").unlink, missing_ok=True
        )

    async def add_upload(
        self, file_id: str, filename: str, purpose: Purpose, num_bytes: int, key_name: str
    ) -> FileRecord:
        """Makes a complete upload a file. If that fails, nothing of it stays.
        Raises ApiError: 507, the disk is full; 500, it fails."""
        path = self.data_path(file_id)
        upload = path.with_suffix(".upload")
        try:
            await _on_disk(partial(sync_file, upload))
            await _on_disk(partial(upload.replace, path))
            return await self._add(file_id, filename, purpose, num_bytes, key_name)
        except BaseException:
            self._bytes.change(key_name, -num_bytes)
            self._counts.change(key_name, -1)
            for suffix in (".upload", ".data", ".json", ".part"):
                with contextlib.suppress(OSError):
                    path.with_suffix(suffix).unlink(missing_ok=True)
            raise

    async def add_results(
        self, file_id: str, filename: str, num_bytes: int, key_name: str
    ) -> FileRecord:
        """Makes results of a batch, which are in their place, a file, also where a server was about to that has
        been killed meanwhile."""
        before = self._records.get(file_id)
        record = await self._add(file_id, filename, "batch_output", num_bytes, key_name)
        self._bytes.change(key_name, num_bytes - (0 if before is None else before.bytes))
        self._counts.change(key_name, int(before is None))
        return record

    async def _add(
        self, file_id: str, filename: str, purpose: Purpose, num_bytes: int, key_name: str
    ) -> FileRecord:
        record = FileRecord(
            id=file_id,
            filename=filename,
            purpose=purpose,
            bytes=num_bytes,
            created_at=int(time.time()),
            key_name=key_name,
        )
        await _on_disk(partial(write_record, self.directory / f"{file_id}.json", record))
        self._records[file_id] = record
        return record

    async def delete(self, record: FileRecord) -> None:
        if self._records.pop(record.id, None) is not None:
            self._bytes.change(record.key_name, -record.bytes)
            self._counts.change(record.key_name, -1)
        await asyncio.to_thread(self._remove, record.id)

    def _remove(self, file_id: str) -> None:
        (self.directory / f"{file_id}.json").unlink(missing_ok=True)
        self.data_path(file_id).unlink(missing_ok=True)
