"""The requests that are with one engine or host, and what is asked of it, whatever way messages go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec

from pagoda.errors import OverloadedError
from pagoda.frontend.endpoint import CacheListener, StepListener
from pagoda.frontend.token_stream import TokenStream
from pagoda.frontend.totals import CounterHistory
from pagoda.messages.frontend import (
    AbortRequests,
    FinishReason,
    FrontendMessage,
    GenerateRequest,
    LoadQuery,
    PrefixCacheUpdate,
    RequestRefused,
    StepStatistics,
    SubscribeCache,
    SubscribeSteps,
    TokenChunk,
    TokenChunks,
    UnsubscribeSteps,
)
from pagoda.messages.load import LoadReport


class EngineSession:
    """Sends requests, gives what comes back to whoever waits for it, and fails all of them together.

    Belongs to one event loop.
    """

    def __init__(
        self,
        send: Callable[[FrontendMessage], Awaitable[None]],
        check: Callable[[], None],
        clock_ns: Callable[[], int],
    ) -> None:
        """`send` takes a message; one that cannot be sent any more is nobody's loss.

        `check` raises what `Endpoint.generate` does when no request can be taken. `clock_ns` says when
        chunks came.
        """
        self._clock_ns = clock_ns
        self._send = send
        self._check = check
        self._streams: dict[str, TokenStream] = {}
        self._queries: dict[int, asyncio.Future[LoadReport]] = {}
        self._num_queries = 0
        self._cache_listeners: list[CacheListener] = []
        self._step_listeners: list[StepListener] = []
        self._questions: set[asyncio.Future[None]] = set()
        self._history = CounterHistory()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    @property
    def has_cache_listeners(self) -> bool:
        return bool(self._cache_listeners)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """As `Endpoint.generate`."""
        self._check()
        stream = TokenStream()
        self._streams[request.request_id] = stream
        self._idle.clear()
        try:
            await self._send(request)
            async for chunk in stream:
                yield chunk
        finally:
            if self._streams.get(request.request_id) is stream:
                del self._streams[request.request_id]
            if not self._streams:
                self._idle.set()
            if not stream.finished:
                await self._send(AbortRequests([request.request_id]))

    async def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.finished:
            stream.push(TokenChunk(request_id, [], FinishReason.ABORT))
            await self._send(AbortRequests([request_id]))

    async def load(self) -> LoadReport:
        query = self._num_queries = self._num_queries + 1
        answer: asyncio.Future[LoadReport] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        try:
            await self._send(LoadQuery(query))
            return await answer
        finally:
            self._queries.pop(query, None)

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        """As `Endpoint.subscribe_cache`. Those who listen already are told all again too."""
        self._cache_listeners.append(listener)
        self._ask(SubscribeCache())
        return partial(self._cache_listeners.remove, listener)

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        """As `Endpoint.subscribe_steps`."""
        self._step_listeners.append(listener)
        self._ask(SubscribeSteps())

        def end() -> None:
            self._step_listeners.remove(listener)
            if not self._step_listeners:
                self._ask(UnsubscribeSteps())

        return end

    def begin(self) -> None:
        """There is an engine, which knows nothing of what the one before it was asked for."""
        if self._cache_listeners:
            self._ask(SubscribeCache())
        if self._step_listeners:
            self._ask(SubscribeSteps())

    def _ask(self, message: SubscribeCache | SubscribeSteps | UnsubscribeSteps) -> None:
        question = asyncio.ensure_future(self._send(message))
        self._questions.add(question)
        question.add_done_callback(self._questions.discard)

    async def finish(self, timeout_s: float) -> None:
        """Returns when no request is left; those that still run after `timeout_s` are aborted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        for request_id in list(self._streams):
            await self.abort(request_id)

    def take(
        self,
        message: TokenChunks | LoadReport | RequestRefused | PrefixCacheUpdate | StepStatistics,
    ) -> None:
        """Hands a message of the engine to the stream, query or listeners that it is for."""
        match message:
            case TokenChunks():
                # Not when its reader comes for it: a client that reads slowly says nothing of the engine.
                now_ns = self._clock_ns()
                for chunk in message.chunks:
                    stream = self._streams.get(chunk.request_id)
                    if stream is not None:
                        msgspec.structs.force_setattr(chunk, "received_ns", now_ns)
                        stream.push(chunk)
            case LoadReport():
                report = self._history.update(message)
                answer = self._queries.get(message.query_id or 0)
                if answer is not None and not answer.done():
                    answer.set_result(report)
            case RequestRefused():
                stream = self._streams.get(message.request_id)
                if stream is not None:
                    refusal = OverloadedError(
                        "The waiting queue is full.", retry_after_s=message.retry_after_s
                    )
                    stream.fail(refusal)
            case PrefixCacheUpdate():
                for listener in list(self._cache_listeners):
                    listener(message)
            case StepStatistics():
                for hear in list(self._step_listeners):
                    hear(message)

    def fail(self, error: Exception) -> None:
        """The engine is gone: all streams and queries end with `error`. What it has counted still counts."""
        self._history.on_engine_lost()
        for stream in self._streams.values():
            stream.fail(error)
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(error)
