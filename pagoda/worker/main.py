# SPDX-License-Identifier: Apache-2.0
"""The worker process: `python -m pagoda.worker.main ADDRESS`.

Its configuration comes over standard input; then it answers step plans, in order, over one ZeroMQ socket.
Plans wait in the socket, so the next one is there when a step ends. Nothing here polls.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import warnings
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from pagoda.errors import ConfigError
from pagoda.faults.injector import Faults
from pagoda.ipc.heap import settle_heap
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.messages.adapters import AdapterLoaded, LoadAdapter, UnloadAdapter
from pagoda.messages.tracing import StartTrace, StopTrace, TraceStopped
from pagoda.messages.worker import StepPlan, StepResult, WorkerFailed, WorkerReady
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.logging import configure_logging
from pagoda.telemetry.trace_ending import EXIT_S, TraceEnding
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.engine_link import EngineLink
from pagoda.worker.pinning import bind, free_threads, set_library_options

if TYPE_CHECKING:
    from pagoda.backend.kv_store import DeviceEvent
    from pagoda.worker.kv.populating import KVPopulator
    from pagoda.worker.kv.transfer_link import TransferThread
    from pagoda.worker.loading import LoadedWorker
    from pagoda.worker.rendezvous import Rendezvous
    from pagoda.worker.runner import Ticket
    from pagoda.worker.stages import StageOutput, StageState

_log = logging.getLogger("pagoda.worker")


@dataclass
class _Worker:
    """A rank that is ready, and what it has to do with its neighbours."""

    loaded: LoadedWorker
    ready: WorkerReady
    populator: KVPopulator
    rendezvous: Rendezvous | None = None
    """None where the rank is the only one."""
    target: StageOutput | None = None
    answers: bool = True
    """True on the rank whose results go to the engine."""
    transfers: TransferThread | None = None
    """None where KV stays on the device."""


def main() -> NoReturn:
    hold_lifeline()
    gc.disable()  # of a fifth of the time that imports take; `settle_heap` turns it on again
    (address,) = sys.argv[1:]
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    configure_logging(place=str(config.place) if config.parallel.num_ranks > 1 else None)
    set_library_options(os.environ)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    faults = Faults(config.faults, config.place.role)
    engine = EngineLink(context, address, config, faults)
    tracer = Tracer(config.place.role)
    if config.trace is not None:
        engine.start_trace(tracer, config.trace)
    worker = _start(config, engine, context, address, tracer, faults)
    if isinstance(worker, WorkerFailed):
        engine.send(worker)
    else:
        worker.loaded.describe(tracer)
        settle_heap()
        engine.send(worker.ready)
        worker.populator.keep_ready_behind(-1)
        try:
            _run(worker, engine, tracer, faults)
        except Exception:
            _log.exception("a step broke this worker")
        if worker.transfers is not None:
            worker.transfers.close()
    tracer.stop(EXIT_S)
    context.destroy()  # waits until the engine has fetched the last message
    # Without taking libraries down: their threads may still be at work on connections to ranks that are gone.
    os._exit(1)


def _run(worker: _Worker, engine: EngineLink, tracer: Tracer, faults: Faults) -> NoReturn:
    ending = TraceEnding(tracer)
    steps = _OpenSteps(worker, engine, tracer, faults)
    while True:
        order = None
        if steps.has_room:
            order = engine.receive([*ending.pollables, *steps.pollables])
        problems = ending.take()
        if problems is not None:
            engine.send(TraceStopped(problems))
        if isinstance(order, StepPlan):
            steps.submit(order)
            continue
        if order is None and steps:
            steps.finish()
            continue
        while steps:
            steps.finish()
        match order:
            case StartTrace(session=session):
                ending.forget()
                engine.start_trace(tracer, session)
                worker.loaded.describe(tracer)
            case StopTrace():
                ending.begin()
            case LoadAdapter():
                engine.send(_load_adapter(worker.loaded, order))
            case UnloadAdapter(digest):
                worker.loaded.adapters.unload(digest)


def _load_adapter(loaded: LoadedWorker, order: LoadAdapter) -> AdapterLoaded:
    digest = order.adapter.digest
    try:
        loaded.adapters.load(order.adapter)
    except ConfigError as error:
        return AdapterLoaded(digest, str(error))
    return AdapterLoaded(digest)


class _OpenSteps:
    """Steps under way, the oldest first.

    A rank that awaits hidden states of the stage before prepares steps meanwhile. Where nothing is awaited, a step
    is computed as soon as it is prepared: this thread is the first of those that compute it, or launches it on a
    device that computes by itself, and reads the one before.
    """

    def __init__(self, worker: _Worker, engine: EngineLink, tracer: Tracer, faults: Faults) -> None:
        from pagoda.worker.event_watcher import EventWatcher
        from pagoda.worker.faults import StepFaults
        from pagoda.worker.input_batch import MAX_STEPS

        self._worker = worker
        point = faults.point("worker.step")
        self._faults = None if point is None else StepFaults(point)
        self._answer = faults.before("worker.stepped", engine.send)
        self._engine = engine
        self._tracer = tracer
        self._source = None if worker.rendezvous is None else worker.rendezvous.source
        self._max_steps = MAX_STEPS
        self._watcher = EventWatcher()
        self._num_launched = 0
        """Steps that a device computes, the oldest of all."""
        self._tickets: deque[Ticket[StepResult] | Ticket[StageState]] = deque()
        self._idle_s = 0.0
        """Seconds that were spent waiting for the stage before, since the last result."""
        self._began = self._ready = 0
        """Times at which the oldest step began, and was prepared with none before it, on the tracer's clock."""

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def has_room(self) -> bool:
        return len(self._tickets) < self._max_steps

    @property
    def pollables(self) -> list[object]:
        """Socket or file that becomes readable once the oldest step can be computed, or read."""
        if not self._tickets:
            return []
        return [self._watcher if self._source is None else self._source.socket]

    def submit(self, plan: StepPlan) -> None:
        """Prepares a step, and computes it if nothing is awaited before, or launches it.

        Raises what the runner raises, behind the results of all steps before."""
        is_only, began = not self._tickets, self._tracer.e2e()
        if is_only:
            self._idle_s += self._engine.take_idle()
        try:
            ticket = self._worker.loaded.runner.submit(plan)
        except Exception:
            while self._tickets:
                self.finish()
            raise
        self._tickets.append(ticket)
        if is_only:
            self._began, self._ready = began, self._tracer.e2e()
        if self._source is not None:
            return
        done = self._launched(ticket)
        if done is not None:
            self._watcher.watch(done)
            self._num_launched += 1
        while len(self._tickets) > (done is not None):
            self.finish()

    def _launched(self, ticket: Ticket[StepResult] | Ticket[StageState]) -> DeviceEvent | None:
        """Launches the newest step. Raises what that raises, behind the results of all steps before."""
        try:
            return ticket.launch()
        except Exception:
            while len(self._tickets) > 1:
                self.finish()
            raise

    def finish(self) -> None:
        """Computes the oldest step and hands its result over."""
        worker, tracer = self._worker, self._tracer
        ticket = self._tickets[0]
        plan, before = ticket.plan, None
        if self._source is not None:
            began = time.monotonic()
            before = self._source.receive(plan)
            self._idle_s += time.monotonic() - began
            if self._ready:
                tracer.span("await stage", self._ready)
        if self._faults is not None:
            self._faults.hit(plan)
        was_launched = self._num_launched > 0
        if was_launched:
            self._watcher.take()
            self._num_launched -= 1
        output = ticket.result(before)
        if worker.transfers is not None:
            worker.transfers.jobs.step_done(plan.step, worker.loaded.kv.computed())
        if isinstance(output, StepResult):
            if worker.answers:
                waited = self._engine.take_idle()
                idle, self._idle_s = self._idle_s + (0.0 if was_launched else waited), 0.0
                if idle:
                    output = msgspec.structs.replace(output, idle_time_s=idle)
                self._answer(output)
        elif worker.target is not None:
            worker.target.send(plan.step, output)
        self._tickets.popleft()
        worker.populator.use(plan)
        if self._began:
            batch = {
                "step": plan.step,
                "tokens": sum(plan.num_tokens),
                "seqs": len(plan.slots),
                "context_tokens": ticket.num_context_tokens,
            }
            tracer.span("step", self._began, batch)
        self._began = self._ready = tracer.e2e()


def _start(
    config: WorkerConfig,
    engine: EngineLink,
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    tracer: Tracer,
    faults: Faults,
) -> _Worker | WorkerFailed:
    try:
        # torch works without numpy, which nothing here needs; its complaint would only alarm.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        config, cores = bind(config)
        return _load(config, cores, engine, context, address, tracer, faults)
    except ConfigError as error:
        return WorkerFailed(str(error), is_user_error=True)
    except Exception as error:
        _log.exception("the model cannot be loaded")
        return WorkerFailed(f"{type(error).__name__}: {error}", is_user_error=False)


# Importing torch takes a second; until then the engine's hang-up must already be heard.


def _load(
    config: WorkerConfig,
    cores: set[int],
    engine: EngineLink,
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    tracer: Tracer,
    faults: Faults,
) -> _Worker:
    """The rank, which meets its peers first where there are any; threads that move KV may use all of `cores`."""
    began = tracer.e2e()
    from pagoda.worker.kv.populating import KVPopulator
    from pagoda.worker.loading import load_runner, plan_worker

    def populator(loaded: LoadedWorker) -> KVPopulator:
        block_sizes = [group.block_size for group in loaded.ready.kv_groups]
        with free_threads(cores):
            return KVPopulator(loaded.kv, block_sizes, config.workers_on_host)

    tracer.span("import torch", began)
    plan = plan_worker(config)
    on_progress = faults.before("worker.load", engine.report_progress)
    if config.parallel.replica_size == 1:
        loaded = load_runner(
            plan,
            tracer,
            on_progress=on_progress,
            await_masks=engine.await_masks,
            faults=faults,
        )
        worker = _Worker(loaded, loaded.ready, populator(loaded))
    else:
        from pagoda.worker.rendezvous import Rendezvous

        hidden_size = plan.shard.config.hidden_size
        rendezvous = Rendezvous(config, context, address, hidden_size=hidden_size)
        began = tracer.e2e()
        peers = engine.meet_peers(rendezvous.hello())
        groups = rendezvous.form_groups(peers)
        tracer.span("meet peers", began)
        loaded = load_runner(
            plan, tracer, groups, engine.agree_on_kv, on_progress, engine.await_masks, faults
        )
        answers = config.place == config.parallel.sampling_place(config.place.dp)
        target = rendezvous.target(peers)
        worker = _Worker(loaded, loaded.ready, populator(loaded), rendezvous, target, answers)
    if not config.has_transfer_link:
        return worker
    from pkgutil import resolve_name

    from pagoda.kv.connector_plugin import find_connector
    from pagoda.worker.kv.remote import OpenRemoteMemory
    from pagoda.worker.kv.transfer_link import TransferSpans, TransferThread
    from pagoda.worker.kv.transfers import TransferWorker, open_tiers, stream_segments

    with free_threads(cores):
        tiers = open_tiers(plan, loaded, faults)
        worker.ready = stream_segments(plan, loaded, tiers, tiers.described(worker.ready))
        remote = None
        if config.kv_handoff is not None:
            open_remote_memory: OpenRemoteMemory = resolve_name(find_connector().worker)
            remote = open_remote_memory(plan, loaded, faults)
            worker.ready = remote.described(worker.ready)
        spans = TransferSpans(tracer, plan.bytes_per_block, remote.group_bytes if remote else ())
        open_transfers = partial(TransferWorker, tiers, remote, faults=faults)
        worker.transfers = TransferThread(context, address, config, open_transfers, spans)
    return worker


if __name__ == "__main__":
    main()
