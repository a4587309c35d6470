# SPDX-License-Identifier: Apache-2.0
"""Arrivals that a router writes down for `pagoda simulate`: when requests came, their lengths, who began alike.

A line of JSON stands for each request that has ended, in the format published with Mooncake (Qin et al., FAST
2025) with a few more keys. It holds no text and no tokens. Ids are digests with a secret that is drawn at the
start and never leaves the process, so that nobody can try texts until the ids are the same.
"""

from __future__ import annotations

import logging
import secrets
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from pagoda.errors import ConfigError
from pagoda.files import append_whole
from pagoda.fleet.placement import TrackedRequest
from pagoda.kv.block_keys import extend_keys, root_key
from pagoda.messages.frontend import GenerateRequest

FLAG = "--record"
TRACE_BLOCK = 512
"""Tokens that an id of a trace stands for, unless its line says otherwise."""
_ID_BYTES = 6
_HASHED_BLOCKS = 64
"""Blocks that are hashed at a time: other threads run in between."""
_MOST_BYTES = 2**26
"""A file that is longer becomes the one before, and another begins."""
_MOST_WAITING = 2**24
"""Tokens of requests that have ended and are not written yet; what is beyond is left out."""
_log = logging.getLogger(__name__)


class TracedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a trace. The first four are those of Mooncake."""

    timestamp: Annotated[float, Meta(ge=0, le=1e14)]
    """Milliseconds since its beginning."""
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[int]
    """One id for each block of the prompt; the last one may be shorter. Equal ids are equal texts."""
    block_size: Annotated[int, Meta(ge=1)] = TRACE_BLOCK
    """Tokens that an id stands for."""
    model: str = ""
    """Name of the router's pool; empty where there is one."""
    session: int | None = None
    """An id of the client's session."""
    priority: int = 0


class _Ended(NamedTuple):
    pool: str
    at_s: float
    request: GenerateRequest
    num_output_tokens: int

    @property
    def size(self) -> int:
        vectors = sum(len(it.vectors) for it in self.request.work.spans)
        return 256 + len(self.request.prompt_token_ids) + vectors // 8


class Recorder:
    """Writes lines of a trace in a thread of its own."""

    def __init__(
        self, path: Path, block_size: int = TRACE_BLOCK, *, max_bytes: int = _MOST_BYTES
    ) -> None:
        """`path` has the latest lines, at most `max_bytes`, and `path` with `.1` as many before them."""
        self._path = path
        self._block_size = block_size
        self._max_bytes = max_bytes
        self._secret = secrets.token_hex(16)
        self._began = 0.0
        self._ended: SimpleQueue[_Ended | None] = SimpleQueue()
        self._num_put = self._num_taken = 0  # each is written by one thread alone
        self._has_left_out = self._has_failed = False
        self._file: FileIO | None = None
        self._thread = Thread(target=self._run, name="record", daemon=True)

    def start(self, now: float) -> None:
        """Moves a file that is there away, and begins at the instant `now` of the dispatchers' clock.
        Raises ConfigError: the file cannot be written."""
        self._began = now
        try:
            self._open()
        except OSError as error:
            raise ConfigError(
                f"{FLAG}: {self._path} cannot be written ({error.strerror}); name a file in a directory "
                "that takes one."
            ) from None
        self._thread.start()

    def ended(self, pool: str, tracked: TrackedRequest) -> None:
        """Takes note of a request that a dispatcher had accepted. Costs the event loop next to nothing."""
        before = len(tracked.request.output_token_ids)
        num_tokens = len(tracked.token_ids) - before
        ended = _Ended(pool, tracked.accepted_at, tracked.request, num_tokens)
        if self._num_put - self._num_taken + ended.size > _MOST_WAITING:
            if not self._has_left_out:
                self._has_left_out = True
                _log.warning(
                    "%s: requests end faster than %s is written; some are missing there.",
                    FLAG,
                    self._path,
                )
            return
        self._num_put += ended.size
        self._ended.put(ended)

    def close(self) -> None:
        """Returns when all lines are written."""
        if self._thread.is_alive():
            self._ended.put(None)
            self._thread.join()
        if self._file is not None:
            self._file.close()

    # ---- in the thread

    def _run(self) -> None:
        encode = msgspec.json.Encoder().encode
        for ended in iter(self._ended.get, None):
            self._write(encode(self._line(ended)) + b"\n")
            self._num_taken += ended.size

    def _line(self, ended: _Ended) -> TracedRequest:
        request, size = ended.request, self._block_size
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        return TracedRequest(
            timestamp=max(0.0, round(1e3 * (ended.at_s - self._began), 1)),
            input_length=len(tokens),
            output_length=ended.num_output_tokens,
            hash_ids=[_id(key) for key in self._keys(tokens, request)],
            block_size=size,
            model=ended.pool,
            session=self._session_id(request.session),
            priority=request.priority,
        )

    def _session_id(self, session: str | None) -> int | None:
        return _id(root_key(0, f"{self._secret}s{session}")) if session else None

    def _keys(self, tokens: list[int], request: GenerateRequest) -> list[bytes]:
        salt, work = f"{self._secret}k{request.salt or ''}", request.work
        keys = [root_key(self._block_size, salt, work.adapter)]
        num_blocks = -(-len(tokens) // self._block_size)
        while len(keys) <= num_blocks:
            end = min(num_blocks, len(keys) - 1 + _HASHED_BLOCKS)
            extend_keys(keys, tokens, self._block_size, end, work.spans)
        return keys[1:]

    def _write(self, line: bytes) -> None:
        """Says once that lines are lost, and again after it went well."""
        try:
            if self._file is None or self._file.tell() + len(line) > self._max_bytes:
                self._open()
            if self._file is not None:
                append_whole(self._file, line)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                _log.warning(
                    "%s: %s cannot be written (%s); requests are missing there until it can be.",
                    FLAG,
                    self._path,
                    error.strerror,
                )

    def _open(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
        if self._path.is_file():
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._file = FileIO(self._path, "x")


def _id(key: bytes) -> int:
    return int.from_bytes(key[:_ID_BYTES], "little")
