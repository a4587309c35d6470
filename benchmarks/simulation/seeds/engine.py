# SPDX-License-Identifier: Apache-2.0
"""An engine process in virtual time: the loop of `pagoda.engine.main` over queues that may be late."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

import msgspec

from benchmarks.simulation.books import check_books, require
from benchmarks.simulation.disk import SimDisk
from benchmarks.simulation.seeds.draw import ENGINE_POISON, ENGINE_TIMEOUT_S
from benchmarks.simulation.seeds.executor import FaultyExecutor
from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.core import EngineCore
from pagoda.engine.kv_transfers import KVTransferHooks, TiersBuilder
from pagoda.engine.main import RequestRoutes
from pagoda.engine.request import Request, RequestState
from pagoda.engine.request_tracing import RequestRows
from pagoda.engine.scheduler import Scheduler
from pagoda.errors import EngineDeadError
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.replica import Replica
from pagoda.ipc.codec import Codec
from pagoda.kv.tiers import build_tiers
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import (
    AbortRequests,
    EngineMessage,
    FinishReason,
    FrontendMessage,
    GenerateRequest,
    LoadQuery,
    RequestRefused,
    SubscribeCache,
    SubscribeSteps,
    TokenChunk,
    TokenChunks,
    UnsubscribeCache,
    UnsubscribeSteps,
)
from pagoda.messages.transfers import Transfer
from pagoda.plugins.disaggregation.hooks import HandoffLinks
from pagoda.plugins.sim.executor import SimExecutor, TransferFate
from pagoda.plugins.simulate.network import SimNetwork
from pagoda.plugins.simulate.sockets import Channel, Process
from pagoda.telemetry.tracer import Tracer

_FRONTEND = b"frontend"
_POISONED_S = 0.004
"""Seconds from when an engine takes a poisoned prompt until it ends."""
_RESTART_S = 0.3
_ROUNDING_S = 1e-8
"""More than the rounding error of an instant on a clock that is far ahead of the event loop's."""
_TO_ENGINE: Codec[FrontendMessage] = Codec(FrontendMessage)
_FROM_ENGINE: Codec[EngineMessage] = Codec(EngineMessage)


class OffsetClock:
    """The clock of one process: that of the event loop, and so many seconds more."""

    def __init__(self, offset_s: float) -> None:
        self.offset_s = offset_s
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return self._loop.time() + self.offset_s

    def on_loop(self, instant: float) -> float:
        """Time of the event loop at which this clock has reached `instant`."""
        return instant - self.offset_s + (_ROUNDING_S if self.offset_s else 0.0)

    def now_ns(self) -> int:
        return 10**15 + round(self.now() * 1e9)


class EngineWorld(msgspec.Struct, frozen=True):
    """Everything that engines share with the rest of the simulation."""

    network: SimNetwork
    """The network of prefill/decode handoff."""
    nan_at: dict[str, int]
    fate: Callable[[Transfer], TransferFate]
    late_s: Callable[[], float]
    """Seconds by which an engine's loop is late."""
    logs: bool
    note: Callable[[str], None]
    """Writes a line to the log, which there is if `logs`."""
    broken: Callable[[BaseException], None]
    """Listener for errors, none of which may happen."""
    crashed: Callable[[str], None]
    """Listener for the ends of workers and engines, with the name of the engine."""


def _may_stay(other: Request, preempted: Request) -> bool:
    """True for a request behind the preempted one that fair shares of tenants spare."""
    if other.order_key[0] != preempted.order_key[0]:
        return False
    return other.tenant != preempted.tenant or not other.has_made_up


class _Preemptions:
    """Watches that of a rank's running requests the last one in order is preempted, of several tenants the last
    one of its tenant among those of the lowest priority, but for such as have not made up for their last
    preemption."""

    def __init__(self, scheduler: Scheduler, note: Callable[[str], None] | None) -> None:
        self._scheduler = scheduler
        self._note = note

    def moved(self, request: Request, before: RequestState, *, is_lost: bool = False) -> None:
        if self._note is not None:
            self._note(f"{request.request_id} {before.name} -> {request.state.name}")
        is_preempted = before is RequestState.RUNNING and request.state is RequestState.WAITING
        if is_preempted and not is_lost:
            kv = self._scheduler.kv
            behind = [
                it
                for it in self._scheduler.running
                if it.order_key > request.order_key and it.table.rank == request.table.rank
            ]
            if kv.is_streamed(
                request.num_tokens
            ):  # for room below the device, or as its segments were lost
                behind = []
            has_tenants = self._scheduler.queue.has_tenants
            wrong = [it for it in behind if not (has_tenants and _may_stay(it, request))]
            require(not wrong, f"{request.request_id} was preempted before others.")

    def sampled(self, request: Request) -> None:
        """Says nothing about preemption."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """Says nothing about preemption."""


class LateEngine:
    """The `ReplicaTransport` of a replica, which supervises its engine as `EngineClient` does."""

    def __init__(
        self,
        config: EngineConfig,
        world: EngineWorld,
        process: Process,
        name: str,
        clock: OffsetClock,
        address: str,
        disk: SimDisk | None,
    ) -> None:
        """`process` is the engine's frontend, in which the replica is; `name` and `address` are the engine's."""
        self._config = config
        self._world = world
        self._process = process
        self._clock = clock
        self._address = address
        self.name = name
        self.disk = disk
        self._loop = asyncio.get_running_loop()
        self._num_starts = 0
        self.core: EngineCore | None = None
        self.executor: FaultyExecutor | None = None
        self._links: HandoffLinks | None = None
        self._routes = RequestRoutes()
        self._newcomers: set[str] = set()
        """Ids of requests that an engine refuses when it has no room."""
        self._inbox: deque[bytes] = deque()
        self._in: Channel[bytes] | None = None
        self._out: Channel[bytes | str] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._hangs_until = 0.0
        self._is_closed = False
        self.num_turns = 0
        self.replica = Replica(
            self,
            "the engine",
            Tracer("frontend", clock_ns=clock.now_ns),
            hang_timeout_s=ENGINE_TIMEOUT_S,
            on_hang=lambda: self.kill(_RESTART_S),
        )

    @property
    def is_unsettled(self) -> bool:
        """True while KV is copied, and while another engine follows one that has ended."""
        scheduler = None if self.core is None else self.core.scheduler
        if scheduler is None:
            return True
        hooks = scheduler.hooks
        return isinstance(hooks, KVTransferHooks) and not hooks.tiers.is_idle

    # ---- Transport

    async def start(self) -> None:
        self._begin()
        await self.replica.wait_open()

    async def close(self) -> None:
        self._is_closed = True
        self.end()
        if self._out is not None:
            self._out.close()
        if self._restart is not None:
            self._restart.cancel()
        self.replica.fail(EngineDeadError("The engine was closed."))

    def send(self, message: FrontendMessage) -> None:
        if self._in is not None:
            self._in.put(_TO_ENGINE.encode(message))

    # ---- faults

    def kill(self, restart_s: float) -> None:
        """Ends the engine with all that is in it; another is there `restart_s` after that is known."""
        if self.core is None or self._is_closed:
            return
        self._world.note(f"{self.name} is killed")
        self._world.crashed(self.name)
        self.end()
        if self._out is not None:
            self._out.put(f"{restart_s}")

    def replace_if_hung(self) -> None:
        """Ends an engine that hangs: a supervisor finds it also where it owes no answer."""
        if self._hangs_until > self._loop.time():
            self.kill(_RESTART_S)

    def hang(self, for_s: float) -> None:
        self._hangs_until = max(self._hangs_until, self._loop.time() + for_s)

    # ---- the process

    def _begin(self) -> None:
        """Starts an engine; the one before has left nothing."""
        world, config, clock = self._world, self._config, self._clock
        self._restart = None
        self._num_starts += 1
        self._hangs_until = 0.0
        self._routes = RequestRoutes()
        self._newcomers.clear()
        world.note(f"{self.name} begins")
        neighbours = None
        if config.handoff is not None:
            engine_id = f"{self.name}-{self._num_starts}"
            role = config.handoff.role
            self._links = world.network.links(engine_id, role, self._address, self.wake_at)
            neighbours = world.network.neighbours
        inner = SimExecutor(
            config.sim,
            clock=clock,
            check_kv=True,
            num_stages=config.worker.parallel.pipeline_parallel_size,
            transfer_fate=world.fate,
            disk=None if self.disk is None else self.disk.objects,
            disk_hangs=(lambda: False) if self.disk is None else self.disk.hangs,
            neighbours=neighbours,
        )
        self.executor = FaultyExecutor(
            inner,
            clock,
            world.nan_at,
            lambda: (
                None
                if self.core is None or self.core.scheduler is None
                else self.core.scheduler.limits
            ),
            lambda: world.crashed(self.name),
        )
        tiers: TiersBuilder = build_tiers
        if self.disk is not None:
            tiers = partial(build_tiers, openers={"disk": self.disk.open_tier}, epoch_s=1e9)
        self.core = EngineCore(
            config,
            self.executor,
            clock,
            tiers,
            self._links,
            Tracer("engine", clock_ns=clock.now_ns),
        )
        self._in = Channel(Process(self.name, self._process.latency), self._take)
        self._out = Channel(self._process, self._deliver)
        self._turn()

    def _limits(self) -> SchedulerLimits | None:
        scheduler = None if self.core is None else self.core.scheduler
        return None if scheduler is None else scheduler.limits

    def end(self) -> None:
        """Ends the engine at once: what it has not said, nobody will hear; what it has said arrives."""
        if self._timer is not None:
            self._timer.cancel()
        if self._in is not None:
            self._in.close()
        if self.executor is not None:
            self.executor.close()
        if self._links is not None:
            self._links.close()
        if self.disk is not None:
            self.disk.close()
        self._inbox.clear()
        self.core = self.executor = self._links = self._timer = self._in = None

    def _deliver(self, payload: bytes | str) -> None:
        """Takes, at the frontend, a message, or the seconds after which another engine follows one that ended."""
        if isinstance(payload, bytes):
            message = _FROM_ENGINE.decode(payload)
            self._note_message("->", message)
            self.replica.receive(message)
        elif self.replica.state is not ReplicaState.FAILED and not self._is_closed:
            self.replica.lose("The engine ended.")
            self._restart = self._loop.call_later(float(payload), self._begin)

    def _take(self, payload: bytes) -> None:
        self._inbox.append(payload)
        self.wake_at(self._loop.time())

    def wake_at(self, instant: float) -> None:
        """Lets the engine look around at an instant of the event loop, or somewhat later."""
        if self.core is None:
            return
        at = max(instant, self._hangs_until)
        if self._timer is None or self._timer.when() > at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(at + self._world.late_s(), self._turn)

    def _turn(self) -> None:
        """One turn of the loop of an engine process."""
        core, self._timer = self.core, None
        if core is None:
            return
        if self._loop.time() < self._hangs_until:
            self.wake_at(self._hangs_until)
            return
        self.num_turns += 1
        try:
            self._serve(core)
        except EngineDeadError as error:
            self._world.note(f"{self.name} gives up: {error}")
            self.kill(_RESTART_S)
        except Exception as error:
            self._world.broken(error)

    def _serve(self, core: EngineCore) -> None:
        had_parts = core.parts is not None
        is_news = bool(self._inbox)
        for payload in list(self._inbox):
            self._handle(core, _TO_ENGINE.decode(payload))
        self._inbox.clear()
        chunks = core.step()
        self._send_chunks(chunks)
        for refusal in core.drain_refusals():
            self._refuse(refusal)
        if not had_parts and core.parts is not None and core.ready is not None:
            rows = _Preemptions(core.parts.scheduler, self._note_move if self._world.logs else None)
            core.parts.scheduler.trace(cast(RequestRows, rows))
            self._say(core.ready)
        report = core.drain_load_report()
        if report is not None:
            self._say(report)
        for update in core.drain_updates():
            self._say(update)
        if core.scheduler is not None and (is_news or chunks or self.num_turns % 4 == 0):
            check_books(core.scheduler)
            self._check_queue(core.scheduler)
        instants = [core.next_wakeup()]
        if self.disk is not None:
            instants.append(self.disk.next_event_at())
        upcoming = min((it for it in instants if it is not None), default=None)
        if upcoming is not None:
            self.wake_at(self._clock.on_loop(upcoming))

    def _check_queue(self, scheduler: Scheduler) -> None:
        """No more requests are there than may be, but for those that return."""
        config = self._config
        number = len(scheduler.requests.keys() & self._newcomers)
        most = config.max_num_seqs + config.max_num_waiting
        require(number <= most, f"{self.name} has {number} requests, and room for {most}.")

    def _note_move(self, text: str) -> None:
        self._world.note(f"{self.name} {text}")

    def _handle(self, core: EngineCore, message: FrontendMessage) -> None:
        self._note_message("<-", message)
        match message:
            case GenerateRequest():
                self._admit(core, message)
            case AbortRequests():
                for wire_id in message.request_ids:
                    engine_id = self._routes.remove(_FRONTEND, wire_id)
                    if engine_id is not None:
                        core.abort(engine_id)
            case LoadQuery(query_id):
                self._say(msgspec.structs.replace(core.load(), query_id=query_id))
            case SubscribeCache():
                core.follow_cache()
            case UnsubscribeCache():
                core.unfollow_cache()
            case SubscribeSteps():
                core.steps.follow()
            case UnsubscribeSteps():
                core.steps.unfollow()

    def _admit(self, core: EngineCore, message: GenerateRequest) -> None:
        request = self._routes.add(_FRONTEND, message)
        require(request is not None, f"The wire id of {message.request_id} was used twice.")
        request = cast(GenerateRequest, request)
        change = self._newcomers.discard if request.returns else self._newcomers.add
        change(request.request_id)
        answer = core.add(request)
        if isinstance(answer, RequestRefused):
            self._refuse(answer)
        else:
            self._send_chunks(answer)
        if ENGINE_POISON in message.prompt_token_ids:
            self._loop.call_later(_POISONED_S, self._die_of_poison, core)

    def _die_of_poison(self, core: EngineCore) -> None:
        if self.core is core:
            self.kill(_RESTART_S)

    def _refuse(self, refusal: RequestRefused) -> None:
        _, wire_id = self._routes.forget(refusal.request_id)
        self._say(msgspec.structs.replace(refusal, request_id=wire_id))

    def _send_chunks(self, chunks: list[TokenChunk]) -> None:
        for batch in self._routes.sort(chunks).values():
            self._say(TokenChunks(batch))

    def _say(self, message: EngineMessage) -> None:
        if self._out is not None:
            self._out.put(_FROM_ENGINE.encode(message))

    def _note_message(self, way: str, message: FrontendMessage | EngineMessage) -> None:
        if self._world.logs:
            self._world.note(f"{self.name} {way} {told(message)}")


def told(message: object) -> str:
    """A message in words that are the same in every process: without random ids."""
    match message:
        case GenerateRequest():
            flags = "".join(
                f" {name}"
                for name, is_so in (
                    ("returns", message.returns),
                    ("holds", message.holds_kv),
                    ("fetches", message.kv_source is not None),
                )
                if is_so
            )
            return (
                f"generate {message.wire_id}={message.request_id} {message.output_token_ids}{flags}"
            )
        case AbortRequests(ids):
            return f"abort {' '.join(ids)}"
        case TokenChunks(chunks):
            return "chunks " + "; ".join(
                f"{it.request_id} {it.token_ids} {it.finish_reason or ''}{it.error or ''}"
                for it in chunks
            )
        case RequestRefused():
            return f"refused {message.request_id} {message.error}"
    return type(message).__name__
