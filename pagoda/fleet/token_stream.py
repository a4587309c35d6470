# SPDX-License-Identifier: Apache-2.0
"""The chunks of one request, from the connection that receives them to the task that reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from pagoda.errors import SlowReaderError
from pagoda.messages.frontend import TokenChunk

MAX_UNREAD = 32_768
"""Chunks, tokens and log-probabilities, all counted together, that may wait for the reader of one stream. They
take at most some 10 MB."""


class TokenStream:
    """An asynchronous iterator over chunks. The stream ends after a chunk with a finish reason, or with an error,
    which is raised after the chunks that came before it. A reader that lets more than `MAX_UNREAD` wait is told
    SlowReaderError, and what waited is dropped.

    One task reads the stream, to its end or until `aclose` (`contextlib.aclosing`).
    """

    def __init__(self, on_abandoned: Callable[[], None] | None = None) -> None:
        """`on_abandoned` is called when the reader closes the stream before its last chunk has arrived."""
        self._chunks: deque[TokenChunk] = deque()
        self._num_unread = 0
        """Sum of `_size` over the chunks; of one alone, however large it is, nothing is dropped."""
        self._error: Exception | None = None
        self._on_abandoned = on_abandoned
        self._waiter: asyncio.Future[None] | None = None
        self.finished = False
        """No more chunks will arrive; those that have arrived may still be unread."""

    def push(self, chunk: TokenChunk) -> None:
        if self.finished:
            return
        if self._num_unread > MAX_UNREAD:
            self._drop()
            return
        self._chunks.append(chunk)
        self._num_unread += _size(chunk)
        self.finished = chunk.finish_reason is not None
        self._wake()

    def fail(self, error: Exception) -> None:
        """`error` must be this stream's own: an exception that several tasks raise keeps the frames of all."""
        if self.finished:
            return
        self._error = error
        self.finished = True
        self._wake()

    async def aclose(self) -> None:
        """Drops what is unread. May be called twice."""
        self._clear()
        self._error = None
        if not self.finished:
            self.finished = True
            self._wake()
            if self._on_abandoned is not None:
                self._on_abandoned()

    def _clear(self) -> None:
        self._chunks.clear()
        self._num_unread = 0

    def _drop(self) -> None:
        self._clear()
        self.fail(
            SlowReaderError(
                f"The client read the answer too slowly: more than {MAX_UNREAD:,} tokens waited."
            )
        )
        if self._on_abandoned is not None:
            self._on_abandoned()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        while not self._chunks:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self.finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunk = self._chunks.popleft()
        self._num_unread -= _size(chunk)
        return chunk

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(chunk: TokenChunk) -> int:
    """Parts of a chunk that take memory; the columns of a prompt are compact, and come while no answer does."""
    if chunk.logprobs is None:
        return 1 + len(chunk.token_ids)
    return 1 + len(chunk.token_ids) + sum(2 * len(one.top_token_ids) for one in chunk.logprobs)
