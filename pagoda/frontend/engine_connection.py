"""The client's side of one engine or host: everything that does not depend on how messages travel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import msgspec

from pagoda.errors import (
    EngineDeadError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
    PagodaError,
)
from pagoda.frontend.endpoint import CacheListener, Health, ReplicaState, StepListener, Unsubscribe
from pagoda.frontend.token_stream import TokenStream
from pagoda.frontend.totals import CounterHistory
from pagoda.frontend.watchdog import Watchdog
from pagoda.messages.frontend import (
    AbortRequests,
    EngineReady,
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

QUERY_TIMEOUT_S = 2.0
"""Seconds until an unanswered query for a load report raises TimeoutError."""
STALL_LIMIT_S = 60.0
"""An engine that has work and finishes no step for this many seconds is not ready."""
PROBE = 0
"""Query id of the watchdog's probes; no query has it."""

Answer = (
    EngineReady | TokenChunks | LoadReport | RequestRefused | PrefixCacheUpdate | StepStatistics
)


class EngineConnection:
    """Sends requests and queries, delivers the answers, and knows the state and the limits of its peer.

    A transport owns the connection and supervises the peer: `EngineClient` (a process), `HostClient` (another
    host), `SimEndpoint` (virtual time). It passes messages on to `receive`, and reports the end of the peer with
    `lose` (another peer will follow) or `fail` (none will). The connection belongs to one event loop.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[FrontendMessage], None],
        clock_ns: Callable[[], int],
        *,
        hang_timeout_s: float | None = None,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` is the peer in errors, such as `the engine`. `send` is called only while the peer is there.
        `clock_ns` stamps chunks on arrival.

        `on_hang` is called when the peer owes an answer and has sent nothing for `hang_timeout_s`; None: never.
        """
        self.name = name
        self._send = send
        self._clock_ns = clock_ns
        self._state = ReplicaState.STARTING
        self._limits: EngineReady | None = None
        self._failure: PagodaError | None = None
        self._failed = asyncio.Event()
        self._settled = asyncio.Event()
        """Set when the peer was ready for the first time, or has failed."""
        self._draining = False
        self._listeners: list[Callable[[], None]] = []
        self._cache_listeners: list[CacheListener] = []
        self._step_listeners: list[StepListener] = []
        self._streams: dict[str, TokenStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._queries: dict[int, asyncio.Future[LoadReport]] = {}
        self._num_queries = PROBE
        self._history = CounterHistory()
        self._watchdog = hang_timeout_s and Watchdog(
            hang_timeout_s,
            is_owed=lambda: bool(self._streams or self._queries),
            probe=lambda: self._tell(LoadQuery(PROBE)),
            on_silence=on_hang,
        )

    # ---- state

    @property
    def limits(self) -> EngineReady:
        if self._limits is None:
            raise RuntimeError(f"{self._subject} has not started.")
        return self._limits

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def is_open(self) -> bool:
        return self._state in (ReplicaState.READY, ReplicaState.DEGRADED)

    @property
    def has_started(self) -> bool:
        return self._limits is not None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def num_streams(self) -> int:
        """Requests whose last chunk has not arrived."""
        return len(self._streams)

    @property
    def num_subscribers(self) -> int:
        return len(self._cache_listeners) + len(self._step_listeners)

    def watch(self, listener: Callable[[], None]) -> Unsubscribe:
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def notify(self) -> None:
        for listener in list(self._listeners):
            listener()

    async def wait_open(self) -> None:
        """Returns when the peer has been ready once.

        Raises:
            PagodaError: the connection has failed before.
        """
        await self._settled.wait()
        self._check_alive()

    async def wait_failed(self) -> EngineDeadError:
        await self._failed.wait()
        return EngineDeadError(str(self._failure))

    async def health(self) -> Health:
        if self._failure is not None:
            return Health(False, str(self._failure).removesuffix("."))
        if self._draining:
            return Health(False, "the server is shutting down")
        if self._limits is None:
            return Health(False, "the model is loading")
        if not self.is_open:
            return Health(False, f"{self.name} is restarting")
        try:
            report = await self.load()
        except (TimeoutError, EngineDeadError, EngineLostError):
            return Health(False, f"{self.name} does not answer")
        if not report.is_worker_ready:
            return Health(False, "the worker is restarting")
        # Of several replicas, the others go on.
        if not report.replicas and report.stalled_for_s > STALL_LIMIT_S:
            return Health(False, f"no step has finished for {report.stalled_for_s:.0f} s")
        return Health(True)

    # ---- requests

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Sends `request` at once. The caller must read the stream to its end or close it.

        Raises:
            InvalidRequestError: a request with this id is running.
            OverloadedError, EngineLostError, EngineDeadError: as `Endpoint.generate`.
        """
        self._check_alive()
        if self._draining:
            raise OverloadedError("The server is shutting down.", retry_after_s=10)
        self._check_open()
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(f"A request with id {request_id} is already running.")
        stream = self._streams[request_id] = TokenStream(partial(self._abandon, request_id))
        self._idle.clear()
        self._expect()
        self._send(request)
        return stream

    async def abort(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._abandon(request_id)
            stream.push(TokenChunk(request_id, [], FinishReason.ABORT))

    async def load(self) -> LoadReport:
        """See `Endpoint.load`.

        Raises:
            EngineLostError, EngineDeadError: there is no peer, or it has ended before it answered.
            TimeoutError: there was no answer within `QUERY_TIMEOUT_S`.
        """
        self._check_alive()
        self._check_open()
        query = self._num_queries = self._num_queries + 1
        answer: asyncio.Future[LoadReport] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        self._expect()
        self._send(LoadQuery(query))
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                return await answer
        finally:
            self._queries.pop(query, None)

    def subscribe_cache(self, listener: CacheListener) -> Unsubscribe:
        """See `Endpoint.subscribe_cache`. Listeners that are subscribed already get everything anew as well."""
        self._cache_listeners.append(listener)
        self._tell(SubscribeCache())
        return partial(self._cache_listeners.remove, listener)

    def subscribe_steps(self, listener: StepListener) -> Unsubscribe:
        self._step_listeners.append(listener)
        self._tell(SubscribeSteps())

        def end() -> None:
            self._step_listeners.remove(listener)
            if not self._step_listeners:
                self._tell(UnsubscribeSteps())

        return end

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        for request_id in list(self._streams):
            await self.abort(request_id)

    # ---- for the transport

    def receive(self, message: Answer) -> None:
        if self._watchdog:
            self._watchdog.heard()
        match message:
            case TokenChunks():
                # Chunks are stamped here, not when they are read: a slow client says nothing about the engine.
                now_ns = self._clock_ns()
                for chunk in message.chunks:
                    stream = self._streams.get(chunk.request_id)
                    if stream is not None:
                        msgspec.structs.force_setattr(chunk, "received_ns", now_ns)
                        if chunk.finish_reason is not None:
                            self._forget(chunk.request_id)
                        stream.push(chunk)
            case LoadReport():
                if self.is_open:
                    is_ready = message.is_worker_ready
                    self._enter(ReplicaState.READY if is_ready else ReplicaState.DEGRADED)
                report = self._history.update(message)
                answer = self._queries.get(message.query_id or PROBE)
                if answer is not None and not answer.done():
                    answer.set_result(report)
            case RequestRefused(request_id, retry_after_s):
                stream = self._forget(request_id)
                if stream is not None:
                    stream.fail(
                        OverloadedError("The waiting queue is full.", retry_after_s=retry_after_s)
                    )
            case PrefixCacheUpdate():
                for listener in list(self._cache_listeners):
                    listener(message)
            case StepStatistics():
                for hear in list(self._step_listeners):
                    hear(message)
            case EngineReady():
                self._open(message)

    def lose(self, reason: str) -> None:
        """The peer has ended and another one will follow. Requests and queries fail with EngineLostError."""
        if self._failure is None:
            self._enter(ReplicaState.STARTING)
            self._end_all(reason)

    def fail(self, failure: PagodaError) -> None:
        """The peer has ended for good. Later calls change nothing."""
        if self._failure is not None:
            return
        self._failure = failure
        self._failed.set()
        self._settled.set()
        self._enter(ReplicaState.FAILED)
        self._end_all(str(failure))

    # ---- internals

    @property
    def _subject(self) -> str:
        return self.name[0].upper() + self.name[1:]

    def _check_alive(self) -> None:
        if self._failure is not None:
            # A new exception each time: one that is raised repeatedly keeps the frames of every raise.
            raise type(self._failure)(str(self._failure))

    def _check_open(self) -> None:
        if not self.is_open:
            raise EngineLostError(f"{self._subject} is not running.")

    def _open(self, limits: EngineReady) -> None:
        changed = limits != self._limits or not self.is_open
        self._limits = limits
        if not self.is_open:
            self._state = ReplicaState.READY
            # This peer knows nothing of what the one before it was asked for.
            if self._cache_listeners:
                self._send(SubscribeCache())
            if self._step_listeners:
                self._send(SubscribeSteps())
        self._settled.set()
        if changed:
            self.notify()

    def _enter(self, state: ReplicaState) -> None:
        if state is not self._state:
            self._state = state
            self.notify()

    def _tell(self, message: FrontendMessage) -> None:
        """A peer that is not there needs to know nothing."""
        if self.is_open:
            self._send(message)

    def _expect(self) -> None:
        if self._watchdog:
            self._watchdog.expect()

    def _abandon(self, request_id: str) -> None:
        self._forget(request_id)
        self._tell(AbortRequests([request_id]))

    def _forget(self, request_id: str) -> TokenStream | None:
        stream = self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()
        return stream

    def _end_all(self, reason: str) -> None:
        if self._watchdog:
            self._watchdog.stop()
        self._history.on_engine_lost()
        streams, self._streams = self._streams, {}
        self._idle.set()
        for stream in streams.values():
            stream.fail(EngineLostError(reason))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineLostError(reason))
