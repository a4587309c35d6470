"""The worker process: `python -m pagoda.worker.main ADDRESS`.

Its configuration comes over standard input; then it answers step plans, in order, over one ZeroMQ socket.
Plans wait in the socket, so the next one is there when a step ends. Nothing here polls.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

from pagoda.errors import ConfigError
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.messages.tracing import StartTrace, StopTrace, TraceStopped
from pagoda.messages.worker import StepPlan, StepResult, WorkerFailed, WorkerReady
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.logging import configure_logging
from pagoda.telemetry.trace_ending import EXIT_S, TraceEnding
from pagoda.telemetry.tracer import Tracer, TraceSession
from pagoda.worker.engine_link import EngineLink
from pagoda.worker.pinning import bind, free_threads
from pagoda.worker.threads import set_thread_waiting

if TYPE_CHECKING:
    from pagoda.worker.description import ModelDescription
    from pagoda.worker.kv.transfer_link import TransferThread
    from pagoda.worker.loading import LoadedWorker, WorkerPlan
    from pagoda.worker.rendezvous import Rendezvous
    from pagoda.worker.runner import Runner, StageRunner
    from pagoda.worker.stages import StageInput, StageOutput

_log = logging.getLogger("pagoda.worker")


@dataclass(frozen=True)
class _Worker:
    """A rank that is ready, and what it has to do with its neighbours."""

    runner: Runner | StageRunner
    ready: WorkerReady
    description: ModelDescription
    rendezvous: Rendezvous | None = None
    source: StageInput | None = None
    target: StageOutput | None = None
    answers: bool = True
    """True on the rank whose results go to the engine."""
    transfers: TransferThread | None = None
    """None where KV stays on the device."""


def main() -> NoReturn:
    hold_lifeline()
    (address,) = sys.argv[1:]
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    configure_logging(place=str(config.place) if config.parallel.num_ranks > 1 else None)
    set_thread_waiting(os.environ)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = EngineLink(context, address, config)
    tracer = Tracer(config.place.role)
    if config.trace is not None:
        _start_trace(tracer, engine, config.trace)
    worker = _start(config, engine, context, address, tracer)
    if isinstance(worker, WorkerFailed):
        engine.send(worker)
    else:
        worker.description.tell(tracer)
        freeze_objects()
        engine.send(worker.ready)
        try:
            _run(worker, engine, tracer)
        except Exception:
            _log.exception("a step broke this worker")
        if worker.transfers is not None:
            worker.transfers.close()
    tracer.stop(EXIT_S)
    context.destroy()  # waits until the engine has fetched the last message
    # Without taking libraries down: their threads may still be at work on connections to ranks that are gone.
    os._exit(1)


def freeze_objects() -> None:
    """Exempts all that is loaded from garbage collection: a full pass would take longer than many steps."""
    gc.collect()
    gc.freeze()


def _run(worker: _Worker, engine: EngineLink, tracer: Tracer) -> NoReturn:
    ending = TraceEnding(tracer)
    while True:
        order = engine.receive(ending.pollables)
        problems = ending.take()
        if problems is not None:
            engine.send(TraceStopped(problems))
        match order:
            case StepPlan() as plan:
                _step(worker, engine, plan, tracer)
            case StartTrace(session=session):
                ending.forget()
                _start_trace(tracer, engine, session)
                worker.description.tell(tracer)
            case StopTrace():
                ending.begin()


def _step(worker: _Worker, engine: EngineLink, plan: StepPlan, tracer: Tracer) -> None:
    began = tracer.e2e()
    before = None
    if worker.source is not None:
        before = worker.source.receive(plan)
        if began:
            tracer.span("await stage", began)
    output = worker.runner.step(plan, before)
    if worker.transfers is not None:
        worker.transfers.jobs.step_done(plan.step)
    if isinstance(output, StepResult):
        if worker.answers:
            engine.send(output)
    elif worker.target is not None:
        worker.target.send(plan.step, output)
    if began:
        batch = {
            "step": plan.step,
            "tokens": sum(plan.num_tokens),
            "seqs": len(plan.slots),
            "context_tokens": worker.runner.batch.num_computed_tokens(plan.slots),
        }
        tracer.span("step", began, batch)


def _start_trace(tracer: Tracer, engine: EngineLink, session: TraceSession) -> None:
    tracer.start(session)
    engine.compare_clocks(tracer)


def _start(
    config: WorkerConfig,
    engine: EngineLink,
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    tracer: Tracer,
) -> _Worker | WorkerFailed:
    try:
        # torch works without numpy, which nothing here needs; its complaint would only alarm.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        config, cores = bind(config)
        worker, plan, loaded = _start_rank(config, engine, context, address, tracer)
        if config.has_transfer_link:
            with free_threads(cores):
                worker = _with_transfers(worker, plan, loaded, context, address, tracer)
        return worker
    except ConfigError as error:
        return WorkerFailed(str(error), is_user_error=True)
    except Exception as error:
        _log.exception("the model cannot be loaded")
        return WorkerFailed(f"{type(error).__name__}: {error}", is_user_error=False)


# Importing torch takes a second; until then the engine's hang-up must already be heard.


def _start_rank(
    config: WorkerConfig,
    engine: EngineLink,
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    tracer: Tracer,
) -> tuple[_Worker, WorkerPlan, LoadedWorker]:
    """The rank, which meets its peers first where there are any."""
    began = tracer.e2e()
    from pagoda.worker.loading import load_runner, plan_worker
    from pagoda.worker.rendezvous import Rendezvous

    tracer.span("import torch", began)
    plan = plan_worker(config)
    parallel, place = config.parallel, config.place
    if parallel.replica_size == 1:
        loaded = load_runner(plan, tracer, on_progress=engine.report_progress)
        return _Worker(loaded.runner, loaded.ready, loaded.description), plan, loaded
    rendezvous = Rendezvous(
        config, context, address, hidden_size=plan.shard.config.hidden_size, dtype=plan.dtype
    )
    began = tracer.e2e()
    peers = engine.meet_peers(rendezvous.hello(plan.num_blocks))
    group = rendezvous.form_group(peers)
    tracer.span("meet peers", began)
    loaded = load_runner(plan, tracer, peers.num_blocks, group, engine.report_progress)
    worker = _Worker(
        loaded.runner,
        loaded.ready,
        loaded.description,
        rendezvous,
        source=rendezvous.source,
        target=rendezvous.target(peers),
        answers=place == parallel.sampling_place(place.dp),
    )
    return worker, plan, loaded


def _with_transfers(
    worker: _Worker,
    plan: WorkerPlan,
    loaded: LoadedWorker,
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    tracer: Tracer,
) -> _Worker:
    """The worker with the KV tiers, and the part in handoff, that it is to have."""
    from pagoda.worker.kv.handoff import open_handoff
    from pagoda.worker.kv.tiers import open_tiers
    from pagoda.worker.kv.transfer_link import TransferSpans, TransferThread
    from pagoda.worker.kv.transfers import TransferWorker

    tiers = open_tiers(plan, loaded)
    handoff = None if plan.config.kv_handoff is None else open_handoff(plan, loaded)
    ready = tiers.described(worker.ready)
    if handoff is not None:
        ready = handoff.described(ready)
    spans = TransferSpans(tracer, plan.block_size * plan.kv_bytes_per_token)
    open_transfers = partial(TransferWorker, tiers, handoff)
    transfers = TransferThread(context, address, plan.config, open_transfers, spans)
    return replace(worker, ready=ready, transfers=transfers)


if __name__ == "__main__":
    main()
