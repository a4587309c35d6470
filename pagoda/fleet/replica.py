# SPDX-License-Identifier: Apache-2.0
"""A replica: the frontend's client of one engine or host. Its transport carries the messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from pagoda.concurrency.watchdog import Watchdog
from pagoda.errors import (
    EngineDeadError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
    PagodaError,
)
from pagoda.fleet.answer_check import AnswerCheck
from pagoda.fleet.endpoint import CacheListener, Health, ReplicaState, StepListener, Unsubscribe
from pagoda.fleet.token_stream import TokenStream
from pagoda.fleet.totals import CounterHistory
from pagoda.messages.frontend import (
    AbortRequests,
    EngineMessage,
    EngineReady,
    FinishReason,
    FrontendMessage,
    GenerateRequest,
    HostLeave,
    LoadQuery,
    PrefixCacheUpdate,
    RequestRefused,
    StepStatistics,
    SubscribeCache,
    SubscribeSteps,
    TokenChunk,
    TokenChunks,
    UnsubscribeCache,
    UnsubscribeSteps,
)
from pagoda.messages.load import LoadReport
from pagoda.telemetry.tracer import Tracer

QUERY_TIMEOUT_S = 2.0
"""Seconds until an unanswered query for a load report raises TimeoutError."""
SILENCE_LIMIT_S = 10.0
"""A peer that owes an answer and has sent nothing for so many seconds is not ready. On a busy machine it, or this
process, may wait for the processor for longer than a query may take."""
STALL_LIMIT_S = 60.0
"""An engine that has work and finishes no step for this many seconds is not ready."""
PROBE = 0
"""Query id of the watchdog's probes; no query has it."""

_LEASES_POLL_S = 0.1
_set = msgspec.structs.force_setattr


class ReplicaTransport(Protocol):
    """The way to the peer of one `Replica`, and the peer's supervision.

    A transport passes messages of the peer to `Replica.receive`, and reports the end of the peer with
    `Replica.lose` (another one will follow) or `Replica.fail` (none will).
    """

    def send(self, message: FrontendMessage) -> None:
        """The replica calls this only while there is a peer."""
        ...

    async def start(self) -> None:
        """See `Replica.start`."""
        ...

    async def close(self) -> None:
        """Ends the peer or the connection to it, and fails the replica."""
        ...


class _Answer(NamedTuple):
    request_id: str
    stream: TokenStream
    check: AnswerCheck


class Replica:
    """An `Endpoint` over one peer, an engine or a host, which may be lost and come back with an empty KV cache.

    Everything here is the same however messages travel; `transport` is an `EngineClient` (a process), a
    `HostClient` (another host), or a `SimEngine` (virtual time). Belongs to one event loop.
    """

    def __init__(
        self,
        transport: ReplicaTransport,
        peer: str,
        tracer: Tracer,
        *,
        name: str = "",
        hang_timeout_s: float | None = None,
        on_hang: Callable[[], None] = lambda: None,
        probes_idle: bool = False,
    ) -> None:
        """`peer` is the subject of errors, such as `the engine`. The clock of `tracer` stamps chunks on arrival.

        `on_hang` is called when the peer owes an answer and has sent nothing for `hang_timeout_s`; None: never.
        With `probes_idle` a peer that owes nothing is asked for its load now and then.
        """
        self.transport = transport
        self.name = name
        """Name for operators, the same in all routers; empty: the dispatcher numbers the replica."""
        self.handicap = 0
        """Tokens of waiting elsewhere that count as much as the peer's distance and price."""
        self.is_leaving = False
        """The peer has said that it takes no new requests."""
        self.blames_requests = True
        """The latest end of the peer may be the fault of a request that it had."""
        self._peer = peer
        self._tracer = tracer
        self.state = ReplicaState.STARTING
        self._limits: EngineReady | None = None
        self._failure: PagodaError | None = None
        self._failed = asyncio.Event()
        self._opened_or_failed = asyncio.Event()
        self._draining = False
        self._listeners: list[Callable[[], None]] = []
        self._work_listeners: list[Callable[[int], None]] = []
        self._cache_listeners: list[CacheListener] = []
        self._step_listeners: list[StepListener] = []
        self._answers: dict[str, _Answer] = {}
        """Requests whose last chunks have not arrived, by `GenerateRequest.wire_id`."""
        self._wire_ids: dict[str, str] = {}
        """Keys of `_answers` by the ids of the requests."""
        self._num_sent = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._queries: dict[int, asyncio.Future[LoadReport]] = {}
        self._num_queries = PROBE
        self._owes_since: float | None = None
        """Time of the first query since the peer was heard; None if there was none."""
        self._history = CounterHistory()
        self._watchdog = hang_timeout_s and Watchdog(
            hang_timeout_s,
            is_owed=lambda: bool(probes_idle or self._answers or self._queries),
            probe=lambda: self._tell(LoadQuery(PROBE)),
            on_silence=on_hang,
        )

    async def start(self) -> None:
        """Returns when the peer is ready for the first time.

        Raises ConfigError if the peer cannot be used for a reason that the user can mend, EngineDeadError for any
        other reason.
        """
        await self.transport.start()

    async def close(self) -> None:
        await self.transport.close()

    # ---- state

    @property
    def limits(self) -> EngineReady:
        if self._limits is None:
            raise RuntimeError(f"{self._subject} has not started.")
        return self._limits

    @property
    def is_open(self) -> bool:
        return self.state in (ReplicaState.READY, ReplicaState.DEGRADED)

    @property
    def has_started(self) -> bool:
        return self._limits is not None

    @property
    def counters(self) -> LoadReport:
        """The counters of all engines so far, as far as they were reported."""
        return self._history.counters or LoadReport()

    @property
    def num_streams(self) -> int:
        """Number of requests whose last chunks have not arrived."""
        return len(self._answers)

    def has_request(self, request_id: str) -> bool:
        """True if the request's last chunk has not arrived."""
        return request_id in self._wire_ids

    @property
    def num_subscribers(self) -> int:
        return len(self._cache_listeners) + len(self._step_listeners)

    def watch(self, listener: Callable[[], None]) -> Unsubscribe:
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def set_handicap(self, num_tokens: int) -> None:
        if num_tokens != self.handicap:
            self.handicap = num_tokens
            self._notify()

    def watch_work_of_others(self, listener: Callable[[int], None]) -> Unsubscribe:
        """Tells `listener` of the pending tokens that the peer has from others than this process, whenever it says
        how many these are. Until then, and from an engine, it has none."""
        self._work_listeners.append(listener)
        return partial(self._work_listeners.remove, listener)

    def take_work_of_others(self, pending_tokens: int) -> None:
        for listener in self._work_listeners:
            listener(pending_tokens)

    async def wait_open(self) -> None:
        """Returns when the peer has been ready once. Raises PagodaError if the connection fails before."""
        await self._opened_or_failed.wait()
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
            return Health(False, f"{self._peer} is restarting")
        try:
            report = await self.load()
        except TimeoutError:
            if self._is_silent:
                return Health(False, f"{self._peer} does not answer")
            report = self._history.last or LoadReport()
        except (EngineDeadError, EngineLostError):
            return Health(False, f"{self._peer} does not answer")
        trouble = _trouble(report)
        return Health(trouble is None, trouble or "")

    # ---- requests

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Sends `request` at once. The caller must read the stream to its end or close it.

        Raises InvalidRequestError if a request with this id is running, and what `Endpoint.generate` raises.
        """
        self._check_alive()
        if self._draining:
            raise OverloadedError("The server is shutting down.", retry_after_s=10)
        self._check_open()
        request_id = request.request_id
        if request_id in self._wire_ids:
            raise InvalidRequestError(f"A request with id {request_id} is already running.")
        # Chunks of an earlier request with the same id may still be on their way.
        self._num_sent += 1
        wire_id = self._wire_ids[request_id] = str(self._num_sent)
        stream = TokenStream(partial(self._abandon, wire_id))
        check = AnswerCheck(request, self.limits.vocab_size)
        self._answers[wire_id] = _Answer(request_id, stream, check)
        self._idle.clear()
        try:
            self.transport.send(msgspec.structs.replace(request, wire_id=wire_id))
        except BaseException:
            self._forget(wire_id)
            raise
        self._expect()
        return stream

    async def abort(self, request_id: str) -> None:
        wire_id = self._wire_ids.get(request_id)
        if wire_id is not None:
            stream = self._answers[wire_id].stream
            self._abandon(wire_id)
            stream.push(TokenChunk(request_id, [], FinishReason.ABORT))

    async def load(self) -> LoadReport:
        """See `Endpoint.load`.

        Raises EngineLostError or EngineDeadError if there is no peer or it ends before it answers, TimeoutError if
        there is no answer within `QUERY_TIMEOUT_S`.
        """
        self._check_alive()
        self._check_open()
        query = self._num_queries = self._num_queries + 1
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[LoadReport] = loop.create_future()
        self._queries[query] = answer
        if self._owes_since is None:
            self._owes_since = loop.time()
        try:
            self.transport.send(LoadQuery(query))
            self._expect()
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                return await answer
        finally:
            self._queries.pop(query, None)

    def subscribe_cache(self, listener: CacheListener) -> Unsubscribe:
        """See `Endpoint.subscribe_cache`. Listeners that are subscribed already get everything anew as well."""
        self._tell(SubscribeCache())
        self._cache_listeners.append(listener)

        def end() -> None:
            self._cache_listeners.remove(listener)
            if not self._cache_listeners:
                self._tell(UnsubscribeCache())

        return end

    def subscribe_steps(self, listener: StepListener) -> Unsubscribe:
        """See `Endpoint.subscribe_steps`. Hosts are not asked: a router may have thousands of them."""
        if self._is_host:
            return lambda: None
        self._tell(SubscribeSteps())
        self._step_listeners.append(listener)

        def end() -> None:
            self._step_listeners.remove(listener)
            if not self._step_listeners:
                self._tell(UnsubscribeSteps())

        return end

    async def drain(self, timeout_s: float) -> None:
        """See `Endpoint.drain`; also waits until other hosts have read the KV that an engine holds for them."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                if not self._is_host:
                    await self._wait_for_leases()
        for request_id in list(self._wire_ids):
            await self.abort(request_id)

    async def _wait_for_leases(self) -> None:
        with contextlib.suppress(EngineDeadError, EngineLostError):
            while True:
                with contextlib.suppress(TimeoutError):  # one late answer says nothing about leases
                    if not (await self.load()).num_wanted_leases:
                        return
                await asyncio.sleep(_LEASES_POLL_S)

    # ---- for the transport

    def receive(self, message: EngineMessage | HostLeave) -> None:
        """Raises PeerError: the message cannot be, and the transport must give the peer up."""
        self._owes_since = None
        if self._watchdog:
            self._watchdog.heard()
        match message:
            case TokenChunks():
                self._receive_chunks(message.chunks)
            case LoadReport():
                if self.is_open:
                    is_ready = message.is_worker_ready
                    self._enter(ReplicaState.READY if is_ready else ReplicaState.DEGRADED)
                report = self._history.update(message)
                answer = self._queries.get(message.query_id or PROBE)
                if answer is not None and not answer.done():
                    answer.set_result(report)
            case RequestRefused():
                stream = self._forget(message.request_id)
                if stream is not None:
                    stream.fail(_refusal(message))
            case PrefixCacheUpdate():
                for listener in list(self._cache_listeners):
                    listener(message)
            case StepStatistics():
                for hear in list(self._step_listeners):
                    hear(message)
            case EngineReady():
                self._open(message)
            case HostLeave():
                self.is_leaving = True
                self._notify()

    def _receive_chunks(self, chunks: list[TokenChunk]) -> None:
        began = self._tracer.e2e()
        # Chunks are stamped here, not when they are read: a slow client says nothing about the engine.
        now_ns = self._tracer.clock_ns()
        for chunk in chunks:
            answer = self._answers.get(chunk.request_id)
            if answer is not None:
                answer.check.take(chunk)
                if chunk.finish_reason is not None:
                    self._forget(chunk.request_id)
                _set(chunk, "request_id", answer.request_id)
                _set(chunk, "received_ns", now_ns)
                answer.stream.push(chunk)
        if began:
            self._tracer.span("chunks", began, {"chunks": len(chunks)})

    def lose(self, reason: str, *, blames_requests: bool = True) -> None:
        """The peer has ended and another one will follow. Requests and queries fail with EngineLostError.
        `blames_requests` says whether one of them may have caused the end."""
        if self._failure is None:
            self.blames_requests = blames_requests
            self._enter(ReplicaState.STARTING)
            self._end_all(reason)

    def fail(self, failure: PagodaError) -> None:
        """The peer has ended for good. Later calls change nothing."""
        if self._failure is not None:
            return
        self._failure = failure
        self._failed.set()
        self._opened_or_failed.set()
        self._enter(ReplicaState.FAILED)
        self._end_all(str(failure))

    # ---- internals

    @property
    def _is_host(self) -> bool:
        return self._limits is not None and bool(self._limits.host_id)

    @property
    def _is_silent(self) -> bool:
        """True if nothing has come for too long since the peer was asked."""
        since = self._owes_since
        return since is not None and asyncio.get_running_loop().time() - since >= SILENCE_LIMIT_S

    @property
    def _subject(self) -> str:
        return self._peer[0].upper() + self._peer[1:]

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
            self.state = ReplicaState.READY
            self._expect()
            # This peer knows nothing of what the one before it was asked for.
            if self._cache_listeners:
                self.transport.send(SubscribeCache())
            if self._step_listeners:
                self.transport.send(SubscribeSteps())
        self._opened_or_failed.set()
        if changed:
            self._notify()

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()

    def _enter(self, state: ReplicaState) -> None:
        if state is not self.state:
            self.state = state
            self._notify()

    def _tell(self, message: FrontendMessage) -> None:
        """A peer that is not there needs to know nothing."""
        if self.is_open:
            self.transport.send(message)

    def _expect(self) -> None:
        if self._watchdog:
            self._watchdog.expect()

    def _abandon(self, wire_id: str) -> None:
        self._forget(wire_id)
        self._tell(AbortRequests([wire_id]))

    def _forget(self, wire_id: str) -> TokenStream | None:
        answer = self._answers.pop(wire_id, None)
        if answer is not None:
            self._wire_ids.pop(answer.request_id, None)
        if not self._answers:
            self._idle.set()
        return None if answer is None else answer.stream

    def _end_all(self, reason: str) -> None:
        if self._watchdog:
            self._watchdog.stop()
        self._history.on_engine_lost()
        self._owes_since = None
        for wire_id, answer in list(self._answers.items()):
            self._forget(wire_id)
            answer.stream.fail(EngineLostError(reason))
        for query in self._queries.values():
            if not query.done():
                query.set_exception(EngineLostError(reason))


def _trouble(report: LoadReport) -> str | None:
    """The reason that nothing is computed; None if something is, or would be, at one of several replicas."""
    if not report.is_worker_ready:
        return "the worker is restarting"
    if report.replicas:
        troubles = [
            "the engine does not answer" if replica.report is None else _trouble(replica.report)
            for replica in report.replicas
        ]
        return None if None in troubles else troubles[0]
    if report.stalled_for_s > STALL_LIMIT_S:
        return f"no step has finished for {report.stalled_for_s:.0f} s"
    return None


def _refusal(message: RequestRefused) -> PagodaError:
    if message.error:
        return InvalidRequestError(message.error)
    return OverloadedError("The waiting queue is full.", retry_after_s=message.retry_after_s)
