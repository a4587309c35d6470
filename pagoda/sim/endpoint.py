"""A replica in virtual time: the engine as it is, over the simulated executor, without a process or a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec

from pagoda.engine.config import EngineConfig
from pagoda.engine.core import EngineCore
from pagoda.errors import EngineDeadError, EngineLostError, OverloadedError
from pagoda.executor.sim import SimExecutor, SimNeighbours
from pagoda.frontend.async_utils import cancel_all
from pagoda.frontend.endpoint import CacheListener, Health, ReplicaState, StepListener
from pagoda.frontend.engine_session import EngineSession
from pagoda.frontend.prefix_index import short_keys
from pagoda.ipc.clock import LoopClock
from pagoda.messages.frontend import (
    AbortRequests,
    EngineReady,
    FrontendMessage,
    GenerateRequest,
    LoadQuery,
    RequestRefused,
    SubscribeCache,
    SubscribeSteps,
    TokenChunk,
    TokenChunks,
    UnsubscribeSteps,
)
from pagoda.messages.load import LoadReport
from pagoda.pd.links import HandoffLinks
from pagoda.sim.network import SimNetwork

_FRONTEND = b"frontend"
"""It has one."""


class SimEndpoint:
    """A `Replica` whose engine dies when it is told to, and is followed by another with an empty cache.

    Belongs to the event loop in which it is started, whose time is the engine's.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        check_kv: bool = False,
        network: SimNetwork | None = None,
        address: str = "",
    ) -> None:
        """With `check_kv` the simulated worker refuses to read KV that is not the sequence's own.

        An engine with a role in prefill/decode handoff reaches others over `network`, whose clock is that of the
        event loop, and where it has `address`, `tcp://HOST:PORT`.
        """
        self._config = config
        self.network = network
        self._address = address
        self._num_starts = 0
        self._check_kv = check_kv
        self._state = ReplicaState.STARTING
        self._listeners: list[Callable[[], None]] = []
        self.name = ""
        self._session = EngineSession(self._send, self._check_open, _now_ns)
        self._limits: EngineReady | None = None
        self._core: EngineCore | None = None
        self._executor: SimExecutor | None = None
        self._links: HandoffLinks | None = None
        self._running: asyncio.Task[None] | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._hangs_until = 0.0
        self._failure: EngineDeadError | None = None
        self._failed = asyncio.Event()
        self._draining = False

    @property
    def limits(self) -> EngineReady:
        if self._limits is None:
            raise RuntimeError("The engine has not started.")
        return self._limits

    @property
    def state(self) -> ReplicaState:
        return self._state

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    async def start(self) -> None:
        self._begin()

    async def wait_failed(self) -> EngineDeadError:
        await self._failed.wait()
        return self._failure or EngineDeadError("The engine was closed.")

    # ---- faults

    def kill(self, *, restart_s: float) -> None:
        """Ends the engine with all that is in it; another is ready `restart_s` later."""
        if self._failure is None:
            self._end(ReplicaState.STARTING)
            self._restart = asyncio.get_running_loop().call_later(restart_s, self._begin)

    def hang(self, for_s: float) -> None:
        """The engine computes nothing for so long; it still takes requests."""
        self._hangs_until = asyncio.get_running_loop().time() + for_s

    def lose_worker(self, *, restart_s: float) -> None:
        """The worker ends; the engine takes requests, and computes nothing until another is ready `restart_s`
        later."""
        core = self._core
        if core is None:
            return
        self.hang(restart_s)
        self._enter(ReplicaState.DEGRADED)

        def on_ready() -> None:
            if self._core is core:
                self._enter(ReplicaState.READY)

        asyncio.get_running_loop().call_later(restart_s, on_ready)

    def give_up(self, reason: str) -> None:
        """Ends the engine for good."""
        if self._failure is None:
            self._failure = EngineDeadError(reason)
            self._failed.set()
            self._end(ReplicaState.FAILED)

    # ---- for tests to inspect

    def check_idle(self) -> None:
        """
        Raises:
            RuntimeError: a request is left, or a block is not free.
        """
        if self._session.num_requests:
            raise RuntimeError(f"{self._session.num_requests} requests have a stream.")
        scheduler = None if self._core is None else self._core.scheduler
        if scheduler is None:
            return
        if scheduler.has_requests():
            raise RuntimeError("The scheduler has requests.")
        pool = scheduler.kv.pool
        pool.check()
        if pool.num_available != pool.num_blocks:
            raise RuntimeError(f"{pool.num_blocks - pool.num_available} blocks are not free.")

    def cached_keys(self) -> set[int]:
        """Short keys of the blocks that a request would find."""
        scheduler = None if self._core is None else self._core.scheduler
        return set() if scheduler is None else set(short_keys(scheduler.kv.pool.keys()))

    def next_wakeup(self) -> float | None:
        """When the engine has something to do; None if it has not."""
        return None if self._core is None else self._core.next_wakeup()

    @property
    def has_cache_listeners(self) -> bool:
        return self._session.has_cache_listeners

    # ---- Endpoint

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self._session.generate(request)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._draining:
            raise OverloadedError("The server is shutting down.", retry_after_s=10)
        self._require_core()

    async def abort(self, request_id: str) -> None:
        await self._session.abort(request_id)

    async def load(self) -> LoadReport:
        if self._failure is not None:
            raise self._failure
        self._require_core()
        return await self._session.load()

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        return self._session.subscribe_cache(listener)

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        return self._session.subscribe_steps(listener)

    async def health(self) -> Health:
        if self._state is ReplicaState.READY:
            return Health(True)
        return Health(False, str(self._failure or "the engine is restarting"))

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        await self._session.finish(timeout_s)

    async def close(self) -> None:
        running = self._running
        self.give_up("The engine was closed.")
        if self._restart is not None:
            self._restart.cancel()
        if running is not None:
            await cancel_all([running])

    # ---- the engine

    def _begin(self) -> None:
        clock = LoopClock()
        self._num_starts += 1
        links, neighbours = self._link()
        executor = self._executor = SimExecutor(
            self._config.sim, clock=clock, check_kv=self._check_kv, neighbours=neighbours
        )
        core = self._core = EngineCore(self._config, executor, clock, handoff=links)
        self._links = links
        core.step()
        self._limits = core.ready
        self._running = asyncio.create_task(self._run(core))
        self._enter(ReplicaState.READY)
        self._session.begin()

    def _link(self) -> tuple[HandoffLinks | None, SimNeighbours | None]:
        if self.network is None or self._config.handoff is None:
            return None, None
        engine_id = f"{self._address}-{self._num_starts}"
        links = self.network.links(
            engine_id, self._config.handoff.role, self._address, self._wake_at
        )
        return links, self.network.neighbours

    def _wake_at(self, instant: float) -> None:
        asyncio.get_running_loop().call_at(instant, self._news.set)

    async def _run(self, core: EngineCore) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while loop.time() < self._hangs_until:
                await asyncio.sleep(self._hangs_until - loop.time())
            self._news.clear()
            self._deliver(core.step())
            for _, news in core.take_news():
                self._session.take(news)
            if (report := core.take_load_report()) is not None:
                self._session.take(report)
            wakeup = core.next_wakeup()
            timer = None if wakeup is None else loop.call_at(wakeup, self._news.set)
            await self._news.wait()
            if timer is not None:
                timer.cancel()

    def _end(self, state: ReplicaState) -> None:
        if self._running is not None:
            self._running.cancel()
        if self._restart is not None:
            self._restart.cancel()
        if self._executor is not None:
            self._executor.close()
        if self._links is not None:
            self._links.close()
        self._core = self._running = self._restart = self._executor = self._links = None
        self._enter(state)
        self._session.fail(EngineLostError("The engine ended."))

    async def _send(self, message: FrontendMessage) -> None:
        """What an engine process would read from its socket; an engine that is gone needs to know nothing."""
        if self._core is None:
            return
        match message:
            case GenerateRequest():
                answer = self._core.add(message)
                if isinstance(answer, RequestRefused):
                    self._session.take(answer)
                    return
                self._deliver(answer)
                self._news.set()
            case LoadQuery():
                self._session.take(
                    msgspec.structs.replace(self._core.load(), query_id=message.query_id)
                )
            case AbortRequests():
                for request_id in message.request_ids:
                    self._core.abort(request_id)
            case SubscribeCache():
                self._core.subscribe_cache(_FRONTEND)
                self._news.set()
            case SubscribeSteps():
                self._core.subscribe_steps(_FRONTEND)
            case UnsubscribeSteps():
                self._core.unfollow_steps(_FRONTEND)

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        self._session.take(TokenChunks(chunks))

    def _enter(self, state: ReplicaState) -> None:
        self._state = state
        for listener in list(self._listeners):
            listener()

    def _require_core(self) -> EngineCore:
        if self._core is None:
            raise EngineLostError("The engine is not running.")
        return self._core


def _now_ns() -> int:
    return round(asyncio.get_running_loop().time() * 1e9)
