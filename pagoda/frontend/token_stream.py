"""The tokens of one request, from whoever receives them to whoever reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from pagoda.engine.messages import TokenChunk


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

    async def __aiter__(self) -> AsyncIterator[TokenChunk]:
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                yield chunk
                if chunk.finish_reason is not None:
                    return
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
