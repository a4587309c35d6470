"""The tokens of one request, from whoever receives them to whoever reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self

from pagoda.messages.frontend import TokenChunk


class TokenStream:
    """A queue of chunks with an end: a finish reason, or an error behind the chunks that came before it."""

    def __init__(self) -> None:
        self._chunks: deque[TokenChunk] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.finished = False
        """Nothing more will come; what has come may still be unread."""

    def push(self, chunk: TokenChunk) -> None:
        if self.finished:
            return
        self._chunks.append(chunk)
        self.finished = chunk.finish_reason is not None
        self._wake()

    def fail(self, error: Exception) -> None:
        if self.finished:
            return
        self._error = error
        self.finished = True
        self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._chunks.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
