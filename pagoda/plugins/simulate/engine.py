# SPDX-License-Identifier: Apache-2.0
"""A replica in virtual time: the engine as it is, over the simulated executor, without a process or a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pagoda.concurrency.async_utils import cancel_all, watched_task
from pagoda.engine.core import EngineCore
from pagoda.engine.scheduler import Scheduler
from pagoda.errors import EngineDeadError
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.prefix_index import short_keys
from pagoda.fleet.replica import Replica
from pagoda.ipc.clock import LoopClock
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import (
    AbortRequests,
    EngineMessage,
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
from pagoda.messages.load import LoadReport
from pagoda.plugins.disaggregation.hooks import HandoffLinks
from pagoda.plugins.sim.executor import SimExecutor
from pagoda.plugins.simulate.leaps import Leaper, LeapExecutor
from pagoda.plugins.simulate.network import SimNetwork
from pagoda.plugins.simulate.processes import ReplicaProcesses, WorkerExecutor
from pagoda.plugins.simulate.sockets import Channel, Process
from pagoda.telemetry.tracer import Tracer

T = TypeVar("T")


class SimEngine:
    """The `ReplicaTransport` of a replica; the engine dies when told to, and another follows with an empty cache.

    Belongs to the event loop in which it is started, whose time is the engine's.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        check_kv: bool = False,
        network: SimNetwork | None = None,
        address: str = "",
        name: str = "",
        latency_s: float = 0.0,
        leap: int = 1,
        processes: ReplicaProcesses | None = None,
    ) -> None:
        """`check_kv` makes the simulated worker refuse to read KV that is not the sequence's own.

        An engine with a role in prefill/decode handoff reaches others over `network`, whose clock is that of the
        event loop, and where it has `address`, `tcp://HOST:PORT`. `name` is that of the replica; messages from and
        to it take `latency_s`. Of a model that answers by seed, steps that only decode are computed `leap` at a
        time as long as nothing else happens (`pagoda.plugins.simulate.leaps`). With `processes` there are no
        leaps, and what engine and frontend do takes time, too.
        """
        self.on_request: Callable[[GenerateRequest], None] = lambda _: None
        """Listener for requests that reach the engine."""
        self.on_ready: Callable[[], None] = lambda: None
        """Listener for each start of the engine."""
        self._latency_s = latency_s
        self._leap = 1 if processes else leap
        self._processes = processes
        self._arrived: list[GenerateRequest] = []
        """Requests that the engine's process has not read."""
        self._reading: list[GenerateRequest] = []
        """Requests for which the engine's process takes its time."""
        self._leaper: Leaper | None = None
        self._late: list[GenerateRequest] = []
        """Requests that came during a leap, which the engine is told of when it has ended."""
        self._ways: tuple[Channel[FrontendMessage], Channel[EngineMessage]] | None = None
        """Wires from and to the replica, while there is an engine and they take time."""
        self.config = config
        self.network = network
        self._address = address
        self._num_starts = 0
        self._check_kv = check_kv
        self._core: EngineCore | None = None
        self._executor: SimExecutor | LeapExecutor | WorkerExecutor | None = None
        self._links: HandoffLinks | None = None
        self._running: asyncio.Task[None] | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._hangs_until = 0.0
        self._is_worker_ready = True
        tracer = Tracer("frontend", clock_ns=_now_ns)
        self.replica = Replica(self, "the engine", tracer, name=name)

    async def start(self) -> None:
        self._begin()

    async def close(self) -> None:
        running = self._running
        self.give_up("The engine was closed.")
        if self._restart is not None:
            self._restart.cancel()
        if running is not None:
            await cancel_all([running])

    def send(self, message: FrontendMessage) -> None:
        """Takes a message as an engine process would; drops messages to an engine that is gone."""
        if self._processes is None:
            self._put(message)
        else:
            self._processes.send(message, self._unless_gone(self._put, message))

    def _put(self, message: FrontendMessage) -> None:
        if self._ways is None:
            self._handle(message)
        else:
            self._ways[0].put(message)

    def _handle(self, message: FrontendMessage) -> None:
        if self._core is None:
            return
        match message:
            case GenerateRequest():
                self.on_request(message)
                if self._processes is not None:
                    self._arrived.append(message)
                    self._news.set()
                elif self._leaper is not None and self._cut_leap():
                    self._leaper.is_ahead = True
                    self._late.append(message)
                else:
                    self._add(self._core, message)
            case LoadQuery(query_id):
                self._tell(self._report(self._core, query_id))
            case AbortRequests():
                self._cut_leap()
                aborted = set(message.request_ids)
                self._late = [it for it in self._late if it.wire_id not in aborted]
                self._arrived = [it for it in self._arrived if it.wire_id not in aborted]
                self._reading = [it for it in self._reading if it.wire_id not in aborted]
                for wire_id in message.request_ids:
                    self._core.abort(wire_id)
            case SubscribeCache():
                self._core.follow_cache()
                self._news.set()
            case UnsubscribeCache():
                self._core.unfollow_cache()
            case SubscribeSteps():
                self._core.steps.follow()
            case UnsubscribeSteps():
                self._core.steps.unfollow()

    def _add(self, core: EngineCore, request: GenerateRequest) -> None:
        # The engine knows requests by their wire ids.
        answer = core.add(msgspec.structs.replace(request, request_id=request.wire_id))
        if isinstance(answer, RequestRefused):
            self._tell(answer)
            return
        self.deliver(answer)
        self._news.set()

    def _cut_leap(self) -> bool:
        """Ends a leap as soon as may be; False without one."""
        is_cut = isinstance(self._executor, LeapExecutor) and self._executor.cut()
        if is_cut:
            self._news.set()
        return is_cut

    def deliver(self, chunks: list[TokenChunk]) -> None:
        self._tell(TokenChunks(chunks))

    def _tell(self, message: EngineMessage) -> None:
        if self._ways is None:
            self._receive(message)
        else:
            self._ways[1].put(message)

    def _receive(self, message: EngineMessage) -> None:
        """The frontend reads a message, unless its engine is gone by then."""
        if self._processes is None:
            self.replica.receive(message)
        else:
            on_read = self._unless_gone(self.replica.receive, message)
            self._processes.receive(message, on_read)

    def _unless_gone(self, handle: Callable[[T], None], message: T) -> Callable[[], None]:
        """Handles a message later, unless the engine that runs now is gone by then."""
        core = self._core

        def handle_it() -> None:
            if self._core is core:
                handle(message)

        return handle_it

    # ---- faults

    def kill(
        self, *, restart_s: float, blames_requests: bool = True, notice_s: float = 0.0
    ) -> None:
        """Ends the engine with all that is in it; another is ready `restart_s` later. `blames_requests` is as in
        `Replica.lose`. Nobody hears of the end before `notice_s` have passed, and then before there is another."""
        if self.replica.state is ReplicaState.FAILED:
            return
        self._end()
        left_s = max(0.0, restart_s - notice_s)
        if notice_s:
            loop = asyncio.get_running_loop()
            self._restart = loop.call_later(notice_s, self._lose, blames_requests, left_s)
        else:
            self._lose(blames_requests, left_s)

    def _lose(self, blames_requests: bool, restart_s: float) -> None:
        self.replica.lose("The engine ended.", blames_requests=blames_requests)
        self._restart = asyncio.get_running_loop().call_later(restart_s, self._begin)

    def stop(self) -> None:
        """Ends the engine; `start` begins another one."""
        if self.replica.state is not ReplicaState.FAILED:
            self._end()
            self.replica.lose("The engine was stopped.", blames_requests=False)

    def hang(self, for_s: float) -> None:
        """Lets the engine compute nothing for `for_s` seconds; it still takes requests."""
        self._hangs_until = asyncio.get_running_loop().time() + for_s

    def set_worker_ready(self, is_ready: bool) -> None:
        """Lets the engine report that its worker computes, or that it does not; it computes all the same."""
        self._is_worker_ready = is_ready
        if self._core is not None:
            self._tell(self._report(self._core, None))

    def lose_worker(self, *, restart_s: float) -> None:
        """The worker ends; the engine takes requests, and computes nothing until another is ready `restart_s`
        later."""
        core = self._core
        self.hang(restart_s)
        self.set_worker_ready(False)

        def on_ready() -> None:
            if self._core is core:
                self.set_worker_ready(True)

        asyncio.get_running_loop().call_later(restart_s, on_ready)

    def give_up(self, reason: str) -> None:
        if self.replica.state is not ReplicaState.FAILED:
            self._end()
            self.replica.fail(EngineDeadError(reason))

    # ---- for tests to inspect

    def check_idle(self) -> None:
        """
        Raises:
            RuntimeError: a request is left, or a block is not free.
        """
        if self.replica.num_streams:
            raise RuntimeError(f"{self.replica.num_streams} requests have a stream.")
        scheduler = self.scheduler
        if scheduler is None:
            return
        if scheduler.requests:
            raise RuntimeError("The scheduler has requests.")
        pool = scheduler.kv.pool
        pool.check()
        if pool.num_available != pool.num_blocks:
            raise RuntimeError(f"{pool.num_blocks - pool.num_available} blocks are not free.")

    def running_tokens(self) -> list[list[int]]:
        """The tokens of the requests that the engine has, prompts first."""
        scheduler = self.scheduler
        requests = () if scheduler is None else scheduler.requests.values()
        return [list(request.token_ids) for request in requests]

    def cached_keys(self) -> set[int]:
        """Short keys of the blocks that a request would find."""
        scheduler = self.scheduler
        return set() if scheduler is None else set(short_keys(scheduler.kv.pool.keys()))

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler; None while there is no engine."""
        return None if self._core is None else self._core.scheduler

    def next_wakeup(self) -> float | None:
        """Time at which the engine has something to do; None if there is nothing."""
        return None if self._core is None else self._core.next_wakeup()

    # ---- the engine

    def _begin(self) -> None:
        clock = LoopClock()
        self._num_starts += 1
        neighbours = None
        if self.network is not None and self.config.handoff is not None:
            engine_id, role = f"{self._address}-{self._num_starts}", self.config.handoff.role
            self._links = self.network.links(engine_id, role, self._address, self._wake_at)
            neighbours = self.network.neighbours
        simulated = SimExecutor(
            self.config.sim, clock=clock, check_kv=self._check_kv, neighbours=neighbours
        )
        executor: SimExecutor | LeapExecutor | WorkerExecutor = simulated
        if self._processes is not None:
            executor = WorkerExecutor(
                simulated, self.config.sim, clock, self._processes, self._news.set
            )
        elif self._leap > 1:
            executor = LeapExecutor(simulated, self.config.sim, clock)
        self._executor = executor
        core = self._core = EngineCore(self.config, executor, clock, handoff=self._links)
        core.step()
        if core.ready is None:
            raise RuntimeError("The simulated engine is not ready after its first step.")
        if core.scheduler is not None and self._leap > 1:
            self._leaper = Leaper(core.scheduler, self._leap)
            core.scheduler.batcher.speculator = self._leaper
        self._running = watched_task(self._run(core))
        if self._latency_s:
            there = Process(self._address, lambda: self._latency_s)
            self._ways = Channel(there, self._handle), Channel(there, self._receive)
        self.replica.receive(core.ready)
        self.on_ready()

    def _wake_at(self, instant: float) -> None:
        asyncio.get_running_loop().call_at(instant, self._news.set)

    async def _run(self, core: EngineCore) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while loop.time() < self._hangs_until:
                await asyncio.sleep(self._hangs_until - loop.time())
            self._news.clear()
            if self._processes is not None:
                await self._think(core, self._processes)
            self.deliver(core.step())
            if self._late and not self._is_leaping:
                self._add_late(core)
            for refusal in core.drain_refusals():
                self._tell(refusal)
            for update in core.drain_updates():
                self._tell(update)
            if core.drain_load_report() is not None:
                self._tell(self._report(core, None))
            wakeup = core.next_wakeup()
            timer = None if wakeup is None else loop.call_at(wakeup, self._news.set)
            await self._news.wait()
            if timer is not None:
                timer.cancel()

    async def _think(self, core: EngineCore, processes: ReplicaProcesses) -> None:
        """Reads requests and results, for which the engine's process takes its time."""
        executor, costs = self._executor, processes.times.engine
        if not isinstance(executor, WorkerExecutor):
            return
        self._reading, self._arrived = self._arrived, []
        num_done = executor.num_done
        seconds = costs.steps_s(num_done, executor.num_seqs_done)
        seconds = processes.slowdown().engine.of(seconds, num_done)
        executor.num_done = executor.num_seqs_done = 0
        seconds += sum(costs.request_s(len(it.prompt_token_ids)) for it in self._reading)
        if seconds:
            done = asyncio.Event()
            processes.engine.do(seconds, done.set)
            await done.wait()
        read, self._reading = self._reading, []
        for request in read:
            self._add(core, request)

    @property
    def _is_leaping(self) -> bool:
        return isinstance(self._executor, LeapExecutor) and self._executor.is_leaping

    def _add_late(self, core: EngineCore) -> None:
        """Adds requests that came during a leap, now that the step is planned that would have been planned before
        they came."""
        late, self._late = self._late, []
        for request in late:
            self._add(core, request)
        if self._leaper is not None:
            self._leaper.is_ahead = False
        self.deliver(core.step())

    def _end(self) -> None:
        if self._running is not None:
            self._running.cancel()
        if self._restart is not None:
            self._restart.cancel()
        if self._executor is not None:
            self._executor.close()
        if self._links is not None:
            self._links.close()
        for way in self._ways or ():
            way.close()
        self._ways = None
        self._late = []
        self._arrived = []
        self._reading = []
        self._leaper = None
        self._core = self._running = self._restart = self._executor = self._links = None

    def _report(self, core: EngineCore, query_id: int | None) -> LoadReport:
        report = core.load()
        is_ready = report.is_worker_ready and self._is_worker_ready
        return msgspec.structs.replace(report, query_id=query_id, is_worker_ready=is_ready)


def _now_ns() -> int:
    return round(asyncio.get_running_loop().time() * 1e9)
