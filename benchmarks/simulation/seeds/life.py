# SPDX-License-Identifier: Apache-2.0
"""Lives a plan in virtual time, and finds whatever must not happen."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.simulation.books import BrokenInvariantError, check_nothing_left, require
from benchmarks.simulation.seeds.client import Answer, ask, check_answers, expected_tokens
from benchmarks.simulation.seeds.draw import ENGINE_POISON, LEASE_S, Ask, Fault, Kind, Plan
from benchmarks.simulation.seeds.engine import EngineWorld, LateEngine
from benchmarks.simulation.seeds.fleet import Host, Router, Surroundings
from pagoda.concurrency.async_utils import cancel_all
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.ipc.clock import LoopClock
from pagoda.ipc.event_socket import SILENCE_S
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.transfers import Transfer
from pagoda.plugins.disaggregation.messages import DecodeMessage, PrefillMessage
from pagoda.plugins.router.host_client import HANG_TIMEOUT_S
from pagoda.plugins.sim.executor import TransferFate
from pagoda.plugins.simulate.event_loop import VirtualTimeLoop
from pagoda.plugins.simulate.network import SimNetwork
from pagoda.plugins.simulate.sockets import Network

_MOST_S = 2000.0
"""Virtual seconds after which a life is stuck: no fault and no time-out lasts so long."""
_SETTLE_S = 2 * LEASE_S + 4.0
"""Virtual seconds after the last answer in which all that is held for others is let go."""
_TRANSFERS_S = 200.0
"""Virtual seconds in which transfers end, of which each may be late."""
_LATENCY_S = 0.0002


@dataclass
class Verdict:
    """The outcome of a life."""

    seed: int
    problem: str = ""
    """Sentence about the first thing that broke; empty if nothing did."""
    log: list[str] = field(default_factory=list)
    """Every message and event, if it was asked for."""
    met: Counter[str] = field(default_factory=Counter)
    """Numbers of things that have happened, by name."""

    @property
    def digest(self) -> str:
        """SHA-256 of the log, in hex."""
        return hashlib.sha256("\n".join(self.log).encode()).hexdigest()


def live(plan: Plan, *, logs: bool = False) -> Verdict:
    """Lives a plan from its beginning to its end; `logs` keeps every message and event."""
    verdict = Verdict(plan.seed)
    late = _lateness(plan)
    catcher = _ErrorCatcher()
    logger = logging.getLogger("pagoda")
    handlers, propagates = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [catcher], False
    try:
        with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, late)) as runner:
            life = Life(plan, verdict, logs)
            runner.run(life.run())
    except (Exception, asyncio.CancelledError) as error:
        verdict.problem = verdict.problem or _describe(error)
    finally:
        logger.handlers, logger.propagate = handlers, propagates
    verdict.problem = verdict.problem or catcher.problem
    if logs:
        verdict.log.append(f"the end: {verdict.problem or 'nothing is broken'}")
    return verdict


class Life:
    """One fleet, its clients and its faults."""

    def __init__(self, plan: Plan, verdict: Verdict, logs: bool) -> None:
        self._plan = plan
        self._verdict = verdict
        self._logs = logs
        self._rng = random.Random(f"{plan.seed} fates")
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_over = asyncio.Event()
        self._num_deaths = 0
        self._is_mended = False
        """Transfers fail no more."""
        self._busy: set[str] = set()
        """Hosts and routers that are being replaced."""
        self.answers: list[Answer] = []

    async def run(self) -> None:
        """Raises whatever breaks first."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        plan = self._plan
        for line in plan.lines():
            self.note(line)
        self._engines = EngineWorld(
            network=SimNetwork(LoopClock(), self._handoff_fate),
            nan_at={it.request.request_id: it.nan_at for it in plan.asks if it.nan_at is not None},
            fate=self._transfer_fate,
            late_s=self._loop_late_s,
            logs=self._logs,
            note=self.note,
            broken=self._break,
            crashed=self._count_death,
        )
        around = Surroundings(plan, self._engines, Network(self.note), self._latency_s)
        self._around = around
        self._hosts = [Host(around, number) for number in range(len(plan.hosts))]
        self._routers = [Router(around, number) for number in range(plan.num_routers)]
        breaking = asyncio.create_task(self._is_over.wait())
        living = asyncio.create_task(self._live())
        try:
            async with asyncio.timeout(_MOST_S):
                await asyncio.wait([breaking, living], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            stuck = [it.ask.request.request_id for it in self.answers if not it.outcome]
            self._break(BrokenInvariantError(f"Stuck; without an end: {' '.join(stuck)}."))
        if living.done() and not self._verdict.problem:
            living.result()
            self._check_loop([breaking, living])
        await cancel_all([breaking, living, *self._tasks])

    async def _live(self) -> None:
        for host in self._hosts:
            await host.start()
        for router in self._routers:
            await router.start([host.record for host in self._hosts if host.record is not None])
        began_at = asyncio.get_running_loop().time()
        works = [self._client(began_at, it) for it in self._plan.asks]
        works += [self._fault(began_at, it) for it in self._plan.faults]
        tasks = [self._spawn(work) for work in works]
        await asyncio.gather(*tasks)
        await asyncio.sleep(_SETTLE_S)
        self._check_answers()
        await self._check_everybody_serves()
        await self._settle()
        self._check_nothing_left()
        self._count()
        for router in self._routers:
            await router.close()
        for host in self._hosts:
            await host.close()

    async def _settle(self) -> None:
        """Waits until leases have run out, slow transfers have ended, and all engines run."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _TRANSFERS_S
        await asyncio.sleep(_SETTLE_S)
        while loop.time() < until and any(it.is_unsettled for it in self._all_engines()):
            await asyncio.sleep(1.0)

    def _all_engines(self) -> list[LateEngine]:
        return [engine for host in self._hosts for engine in host.engines]

    # ---- clients

    async def _client(self, began_at: float, it: Ask) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, began_at + it.at - loop.time()))
        answer = Answer(it)
        self.answers.append(answer)
        home: Host | Router
        if it.router >= 0:
            home = self._routers[it.router]
        else:
            home = self._hosts[-1 - it.router]
        task = self._spawn(ask(answer, home))
        home.clients[task] = None
        task.add_done_callback(home.clients.pop)
        timers = []
        if it.cancels_at is not None:
            timers.append(loop.call_later(it.cancels_at, self._cancel, task, answer))
        if it.aborts_at is not None:
            timers.append(loop.call_later(it.aborts_at, self._abort, home, it.request))
        try:
            await asyncio.wait([task])
        finally:
            for timer in timers:
                timer.cancel()
        if task.cancelled():
            answer.outcome = answer.outcome or "lost"
        self.note(f"{it.request.request_id} {answer.outcome} {answer.finish} {answer.tokens}")

    def _cancel(self, task: asyncio.Task[None], answer: Answer) -> None:
        if not task.done():
            answer.outcome = "cancelled"
            task.cancel()

    def _abort(self, home: Host | Router, request: GenerateRequest) -> None:
        if home.is_up:
            self._spawn(home.dispatcher.abort(request.request_id))

    # ---- faults

    async def _fault(self, began_at: float, fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, began_at + fault.at - loop.time()))
        self.note(f"fault: {fault.kind} {fault.target} {fault.value:.4f}")
        if fault.kind in (Kind.KILL_ROUTER, Kind.STALL_ROUTER):
            if self._routers:
                await self._router_fault(self._routers[fault.target % len(self._routers)], fault)
            return
        host = self._hosts[fault.target % len(self._hosts)]
        if not host.is_up or host.name in self._busy:
            return
        self._verdict.met[str(fault.kind)] += 1
        engine = host.engines[fault.target // len(self._hosts) % len(host.engines)]
        match fault.kind:
            case Kind.KILL_HOST:
                await self._replace_host(host, fault.value, kills=True)
            case Kind.LEAVE_HOST:
                await self._replace_host(host, fault.value, kills=False)
            case Kind.STALL_HOST:
                host.process.stall(fault.value)
                if fault.value >= HANG_TIMEOUT_S:
                    self._count_death(host.name)
            case Kind.CUT_LINKS:
                self._around.hosts.cut(host.process, fault.value)
                if fault.value >= SILENCE_S:
                    self._count_death(host.name)
            case _:
                self._engine_fault(engine, fault)

    def _engine_fault(self, engine: LateEngine, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL_ENGINE:
                engine.kill(fault.value)
            case Kind.HANG_ENGINE:
                engine.hang(fault.value)
            case Kind.KILL_WORKER:
                if engine.executor is not None:
                    engine.executor.die()
            case Kind.HANG_WORKER:
                if engine.executor is not None:
                    engine.executor.hang(fault.value)
            case Kind.CUT_HANDOFF:
                self._engines.network.cut(f"tcp://{engine.name}:1")
            case Kind.HANG_DISK:
                if engine.disk is not None:
                    engine.disk.hang(fault.value)
            case Kind.LOSE_OBJECTS:
                if engine.disk is not None:
                    for key in list(engine.disk.objects):
                        if self._rng.random() < fault.value:
                            del engine.disk.objects[key]
        engine.wake_at(asyncio.get_running_loop().time())

    async def _replace_host(self, host: Host, after_s: float, *, kills: bool) -> None:
        self._busy.add(host.name)
        address = "" if host.record is None else host.record.address
        for router in self._routers:
            if router.looks_for_hosts:
                router.name_host(address, None)
        if kills:
            self._count_death(host.name)
            await host.kill()
        else:
            host.door.leave()
            host.record = None
            while host.dispatcher.requests:
                await asyncio.sleep(0.05)
            await host.finish()
        self.note(f"{host.name} has ended")
        await asyncio.sleep(after_s)
        await host.start()
        for router in self._routers:
            if router.looks_for_hosts:
                router.name_host(address, host.record)
        self._busy.discard(host.name)
        self.note(f"{host.name} is back")

    async def _router_fault(self, router: Router, fault: Fault) -> None:
        if not router.is_up or router.name in self._busy:
            return
        self._verdict.met[str(fault.kind)] += 1
        if fault.kind is Kind.STALL_ROUTER:
            router.process.stall(fault.value)
            return
        self._busy.add(router.name)
        await router.kill()
        await asyncio.sleep(fault.value)
        while not any(host.is_up for host in self._hosts):
            await asyncio.sleep(0.1)
        await router.start([host.record for host in self._hosts if host.record is not None])
        self._busy.discard(router.name)

    # ---- chances

    def _handoff_fate(self, _: DecodeMessage | PrefillMessage) -> list[float]:
        chances, rng = self._plan.chances, self._rng
        if rng.random() < chances.handoff_dropped:
            return []
        delays = [_LATENCY_S]
        if rng.random() < chances.handoff_late:
            delays = [rng.choice([0.01, 0.1, LEASE_S - 0.1])]
        if rng.random() < chances.handoff_twice:
            delays.append(rng.choice([0.0, 0.05, 1.0]))
        return delays

    def _transfer_fate(self, _: Transfer) -> TransferFate:
        if self._is_mended:
            return TransferFate(0.0, ())
        chances, rng = self._plan.chances, self._rng
        delay_s, failed = 0.0, tuple[int, ...]()
        if rng.random() < chances.transfer_late:
            delay_s = rng.choice([0.01, 0.1, LEASE_S + 1])
        if rng.random() < chances.transfer_failed:
            failed = (0,)
        return TransferFate(delay_s, failed)

    def _latency_s(self) -> float:
        chances, rng = self._plan.chances, self._rng
        if chances.message_late and rng.random() < chances.message_late:
            return rng.uniform(_LATENCY_S, chances.late_s)
        return _LATENCY_S

    def _loop_late_s(self) -> float:
        chances, rng = self._plan.chances, self._rng
        if chances.loop_late and rng.random() < chances.loop_late:
            return rng.uniform(0.0, chances.loop_late_s)
        return 0.0

    # ---- what must be true

    def _check_answers(self) -> None:
        outages = {Kind.KILL_HOST, Kind.LEAVE_HOST, Kind.STALL_HOST, Kind.CUT_LINKS}
        outages |= {Kind.KILL_ENGINE, Kind.HANG_ENGINE}
        has_outages = any(fault.kind in outages for fault in self._plan.faults)
        check_answers(self._plan, self.answers, self._num_deaths, has_outages)

    async def _check_everybody_serves(self) -> None:
        """All that was broken works again."""
        self._is_mended = True
        for engine in self._all_engines():
            engine.replace_if_hung()
        await asyncio.sleep(1.0)
        homes: list[Host | Router] = [*self._hosts, *self._routers]
        for number, home in enumerate(homes):
            require(home.is_up, f"{home.name} did not come back.")
            stalled_s = home.process.stalled_until - asyncio.get_running_loop().time()
            if stalled_s > 0:
                await asyncio.sleep(stalled_s + _SETTLE_S)
            request = GenerateRequest(
                request_id=f"last{number}",
                prompt_token_ids=[number % ENGINE_POISON, 1, 2],
                work=Work(SamplingParams(seed=number, max_tokens=1)),
            )
            answer = Answer(Ask(0.0, 0, 0, request, 3, None, None, None, 0.0, None))
            await ask(answer, home)
            whole = expected_tokens(request, self._plan.engine.max_model_len)
            text = f"{home.name} does not serve: {answer.outcome} {answer.error}"
            require(answer.tokens == whole, text)

    def _check_nothing_left(self) -> None:
        for router in self._routers:
            self._check_dispatcher(router.name, router.dispatcher)
            self._check_dispatcher(router.name, router.members.prefill)
        for host in self._hosts:
            self._check_dispatcher(host.name, host.dispatcher)
            require(host.door.num_requests == 0, f"{host.name} has requests of routers.")
            for engine in host.engines:
                scheduler = None if engine.core is None else engine.core.scheduler
                require(scheduler is not None, f"{engine.name} does not run.")
                if scheduler is not None:
                    check_nothing_left(scheduler)

    @staticmethod
    def _check_dispatcher(name: str, dispatcher: Dispatcher) -> None:
        require(not dispatcher.requests, f"{name} has requests: {' '.join(dispatcher.requests)}.")
        require(dispatcher.quarantine.suspect is None, f"{name} has a request in quarantine.")
        for slot in dispatcher.slots:
            require(slot.work.pending_tokens == 0, f"{name} counts tokens at {slot.name}.")
            require(not slot.requests, f"{name} has requests at {slot.name}.")
            require(slot.num_streams == 0, f"{name} counts streams at {slot.name}.")
            require(slot.replica.num_streams == 0, f"{name} has open streams at {slot.name}.")

    def _check_loop(self, own: list[asyncio.Task[Any]]) -> None:
        """No task and no timer is left once everything is closed."""
        current = asyncio.current_task()
        left = [it for it in asyncio.all_tasks() if it is not current and it not in own]
        names = sorted(str(it.get_coro()) for it in left)
        require(
            not left, f"Tasks are left: {', '.join(name.partition(' at ')[0] for name in names)}."
        )

    # ---- internals

    def note(self, text: str) -> None:
        """Writes a line to the log."""
        if self._logs:
            self._verdict.log.append(f"{asyncio.get_running_loop().time():.6f} {text}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._verdict.problem:
            self._verdict.problem = _describe(error)
            self._is_over.set()

    def _on_loop_error(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None:
            self._break(error)
        elif not self._verdict.problem:
            self._break(BrokenInvariantError(str(context.get("message"))))

    def _count_death(self, name: str) -> None:
        self._num_deaths += 1
        self._verdict.met["deaths"] += 1
        self.note(f"{name} or its worker has ended, or is lost to routers")

    def _count(self) -> None:
        met = self._verdict.met
        for answer in self.answers:
            met[f"answers: {answer.outcome}"] += 1
            met["refusals"] += answer.num_refusals
        for host in self._hosts:
            for engine in host.engines:
                if engine.core is not None and engine.core.scheduler is not None:
                    counters = engine.core.scheduler.counters
                    met["preemptions"] += counters.num_preemptions
                    met["cold segments"] += counters.num_cold_segments
                    met["lost segments"] += counters.num_lost_segments
                    met["steps"] += counters.num_steps
                    met["drafts"] += counters.num_draft_tokens
                    met["right drafts"] += counters.num_accepted_tokens
                met["turns"] += engine.num_turns


class _ErrorCatcher(logging.Handler):
    """Keeps the first exception that the product logged instead of raising it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.problem = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and not self.problem:
            self.problem = f"{record.getMessage()}: {_describe(record.exc_info[1])}"


def _describe(error: BaseException) -> str:
    """The error and where it came from, the same in every process."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error} ({place})"


def _lateness(plan: Plan) -> Any:
    rng, chances = random.Random(f"{plan.seed} lateness"), plan.chances

    def late_s() -> float:
        is_late = chances.loop_late and rng.random() < chances.loop_late
        return rng.uniform(0.0, chances.loop_late_s) if is_late else 0.0

    return late_s
