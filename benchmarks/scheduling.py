"""What a step costs the engine besides the model: planning it and taking its results.

The scheduler runs in this process, with 256 requests that each have a context of their own, two steps
under way as in the engine, and the simulated worker's time left out.
"""

from __future__ import annotations

import time
from collections import deque

from benchmarks.figure import Figure
from pagoda.engine.messages import GenerateRequest, SamplingParams, SimConfig, StepResult
from pagoda.engine.scheduler import Scheduler, SchedulerLimits
from pagoda.executor.sim import SimWorker
from pagoda.kv.manager import KVManager

_RUNNING = 256
_CONTEXTS = (1_000, 10_000, 100_000)
_WARM_UP_STEPS = 16
_STEPS = 320
_BLOCK_SIZE = 16
_VOCAB_SIZE = 512


def measure_scheduling() -> list[Figure]:
    """Milliseconds of schedule + update for each step, by context length."""
    return [
        Figure(
            what=f"schedule + update, {_RUNNING} running, context {context // 1000} k",
            measured=_measure(context),
            target="≤ 1.5 ms a step, flat",
            command="python -m benchmarks.main_job scheduling",
        )
        for context in _CONTEXTS
    ]


def _measure(context: int) -> str:
    scheduler, worker = _scheduler(context)
    for index in range(_RUNNING):
        scheduler.add(_request(index, context))
    pending: deque[StepResult] = deque()
    _plan(scheduler, worker, pending)
    for _ in range(_WARM_UP_STEPS):
        _step(scheduler, worker, pending)
    seconds = sorted(_step(scheduler, worker, pending) for _ in range(_STEPS))
    mean, p99 = sum(seconds) / len(seconds), seconds[int(0.99 * len(seconds))]
    return f"{1000 * mean:.2f} ms mean, {1000 * p99:.2f} ms p99"


def _scheduler(context: int) -> tuple[Scheduler, SimWorker]:
    max_model_len = context + 2 * _STEPS
    num_blocks = _RUNNING * (max_model_len // _BLOCK_SIZE + 2)
    limits = SchedulerLimits(
        max_num_seqs=_RUNNING,
        max_num_batched_tokens=_RUNNING * context,
        max_model_len=max_model_len,
    )
    config = SimConfig(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_model_len=max_model_len,
        vocab_size=_VOCAB_SIZE,
    )
    worker = SimWorker(config, check_kv=False)
    return Scheduler(limits, KVManager(num_blocks, _BLOCK_SIZE)), worker


def _request(index: int, context: int) -> GenerateRequest:
    # Staggered lengths, so that requests reach the end of a block in different steps.
    length = context - index % _BLOCK_SIZE
    prompt = [index, *((index + position) % _VOCAB_SIZE for position in range(length - 1))]
    sampling = SamplingParams(max_tokens=2 * _STEPS, seed=index)
    return GenerateRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)


def _plan(scheduler: Scheduler, worker: SimWorker, pending: deque[StepResult]) -> float:
    start = time.perf_counter()
    plan = scheduler.schedule()
    elapsed = time.perf_counter() - start
    if plan is None:
        raise RuntimeError("the scheduler found nothing to do")
    pending.append(worker.execute(plan, 0.0))
    return elapsed


def _step(scheduler: Scheduler, worker: SimWorker, pending: deque[StepResult]) -> float:
    planning = _plan(scheduler, worker, pending)
    result = pending.popleft()
    start = time.perf_counter()
    scheduler.update(result)
    return planning + time.perf_counter() - start
