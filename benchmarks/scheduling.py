# SPDX-License-Identifier: Apache-2.0
"""Cost of a step to the engine besides the model: planning it and taking its results.

The scheduler runs in this process, with 256 requests that each have a context of their own, two steps in flight as
in the engine, and the simulated worker's time left out. In one case more requests wait behind one whose prompt is
cached for its first half and does not fit, so every step has to find that out. Two cases have many requests: 1,024
that run, and a burst of arrivals in front of a tier.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.figure import Figure
from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.drafting.assembly import build_speculator
from pagoda.engine.drafting.speculator import Speculator
from pagoda.engine.kv_transfers import KVTransferHooks
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import MonotonicClock
from pagoda.kv.manager import KVManager
from pagoda.kv.tiers import build_tiers
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.engine_config import SimConfig
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.speculation import SpeculativeConfig
from pagoda.messages.worker import Capabilities, StepResult, WorkerReady
from pagoda.plugins.sim.executor import SimWorker

_RUNNING = 256
_CONTEXTS = (1_000, 10_000, 100_000)
_WARM_UP_STEPS = 16
_STEPS = 160
_BLOCK_SIZE = 16
_VOCAB_SIZE = 512
_DRAFTING = 32_000
_ROOM = _WARM_UP_STEPS + _STEPS + 4
"""Tokens that an answer may have: more than are measured, so that none ends."""

_WAITING = 256
_LONG_PROMPT = 100_000
_CACHED = 50_000


_MANY = 1_024
_BURST = 4_096
_BURST_PROMPT = 64


def measure_scheduling() -> list[Figure]:
    """Milliseconds of schedule + update for each step, and of a burst of arrivals."""
    contexts = {
        f"schedule + update, {_RUNNING} running, context {context // 1000} k": _measure(context)
        for context in _CONTEXTS
    }
    stuck = (
        f"the same at 1 k, {_WAITING} waiting behind {_LONG_PROMPT // 1000} k tokens, half cached"
    )
    measured = [
        (what, figures, "≤ 1.5 ms a step, flat")
        for what, figures in {**contexts, stuck: _measure_stuck_queue(1_000)}.items()
    ]
    many = f"schedule + update, {_MANY} running, context 1 k"
    measured.append((many, _measure(1_000, _MANY), "≤ 3 ms a step"))
    burst = f"{_BURST} arrivals with a host tier, and the step that admits {_MANY} of them"
    measured.append((burst, _measure_burst(), "≤ 0.3 s in all"))
    drafting = f"drafting, {_RUNNING} running, context {_DRAFTING // 1000} k, all indexes behind"
    measured.append((drafting, _measure_drafting(), "≤ 0.5 ms a step"))
    command = "python -m benchmarks.main_job scheduling"
    return [
        Figure(what=what, measured=figures, target=target, command=command)
        for what, figures, target in measured
    ]


def _measure(context: int, num_running: int = _RUNNING) -> str:
    room = context + _ROOM
    steps = _Steps(
        max_model_len=room, num_blocks=num_running * _blocks(room), max_num_seqs=num_running
    )
    for index in range(num_running):
        steps.scheduler.add(_request(index, context - index % _BLOCK_SIZE))
    steps.begin()
    return steps.measure()


def _measure_drafting() -> str:
    """The part of it that seeks drafts, judges them and indexes texts, with room for a draft of each request."""
    room = _DRAFTING + _ROOM
    steps = _Steps(
        max_model_len=room, num_blocks=_RUNNING * _blocks(room), max_num_seqs=2 * _RUNNING
    )
    speculator = build_speculator(SpeculativeConfig(), 0)
    steps.scheduler.batcher.speculator = timed = _Timed(speculator)
    for index in range(_RUNNING):
        steps.scheduler.add(_request(index, _DRAFTING - index % _BLOCK_SIZE))
    steps.begin()
    return steps.measure(timed.take)


class _Timed:
    """A speculator whose calls are timed."""

    def __init__(self, speculator: Speculator | None) -> None:
        self._speculator, self._spent_s = speculator, 0.0

    def take(self) -> float:
        """Seconds since the last call."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._speculator, name)
        return partial(self._call, found) if callable(found) else found

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._speculator, name, value)

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **options)
        self._spent_s += time.perf_counter() - start
        return result


def _measure_burst() -> str:
    num_blocks = 2 * _MANY * _blocks(_BURST_PROMPT)
    limits = SchedulerLimits(
        max_num_seqs=_MANY, max_num_batched_tokens=_MANY * _BURST_PROMPT, max_model_len=1_000
    )
    kv, clock = KVManager(num_blocks, _BLOCK_SIZE), MonotonicClock()
    ready = WorkerReady(
        capabilities=Capabilities(
            block_sizes=(_BLOCK_SIZE,), max_batch_tokens=1, max_batch_seqs=1, max_model_len=1
        ),
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_model_len=limits.max_model_len,
        vocab_size=_VOCAB_SIZE,
        summary="",
        kv_host_slots=num_blocks,
    )
    tiers = build_tiers(None, ready, kv.pool, TransferLedger(kv.pool), clock)
    if tiers is None:
        raise RuntimeError("there is no host tier")
    tiers.workers_ready(ready)
    scheduler = Scheduler(limits, kv, clock)
    KVTransferHooks(scheduler, tiers)
    requests = [_request(index, _BURST_PROMPT) for index in range(_BURST)]
    gc.collect()
    began = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    added = time.perf_counter()
    if scheduler.schedule() is None or len(scheduler.running) != _MANY:
        raise RuntimeError("the step does not admit as many as may run")
    scheduled = time.perf_counter()
    return f"{1000 * (added - began):.0f} ms + {1000 * (scheduled - added):.0f} ms"


def _measure_stuck_queue(context: int) -> str:
    """One of the running requests holds the first half of the long prompt; the rest of it finds no room."""
    room = _blocks(context + _ROOM)
    steps = _Steps(
        max_model_len=_LONG_PROMPT + _ROOM,
        num_blocks=(_RUNNING - 1) * room + _blocks(_CACHED + _ROOM),
        max_num_seqs=_RUNNING + _WAITING,
    )
    scheduler = steps.scheduler
    scheduler.add(_request(_RUNNING, _CACHED))
    for index in range(_RUNNING - 1):
        scheduler.add(_request(index, context - index % _BLOCK_SIZE))
    steps.begin()
    steps.step()
    scheduler.add(_request(_RUNNING, _LONG_PROMPT))
    for index in range(_WAITING - 1):
        scheduler.add(_request(_RUNNING + 1 + index, context))
    figures = steps.measure()
    if len(scheduler.waiting) != _WAITING or scheduler.counters.num_preemptions:
        raise RuntimeError("the queue was not stuck")
    return figures


class _Steps:
    """A scheduler and a simulated worker, with two steps under way."""

    def __init__(
        self, *, max_model_len: int, num_blocks: int, max_num_seqs: int = _RUNNING
    ) -> None:
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=_RUNNING * max_model_len,
            max_model_len=max_model_len,
        )
        config = SimConfig(
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            max_model_len=max_model_len,
            vocab_size=_VOCAB_SIZE,
        )
        self.scheduler = Scheduler(limits, KVManager(num_blocks, _BLOCK_SIZE), MonotonicClock())
        self._worker = SimWorker(config, check_kv=False)
        self._pending: deque[StepResult] = deque()

    def begin(self) -> None:
        """Plans the first step, which computes all prompts."""
        self._plan()

    def step(self) -> float:
        """Plans a step and takes the result of the one before; returns the scheduler's time for both."""
        planning = self._plan()
        result = self._pending.popleft()
        start = time.perf_counter()
        self.scheduler.update(result)
        return planning + time.perf_counter() - start

    def measure(self, taken: Callable[[], float] | None = None) -> str:
        """Median, mean and p99 of many steps, after some to warm up; `taken` gives a part of the last one's."""
        gc.collect()
        gc.freeze()  # as the engine does once its block pool exists
        for _ in range(_WARM_UP_STEPS):
            self.step()
        seconds = []
        for _ in range(_STEPS):
            whole = self.step()
            seconds.append(whole if taken is None else taken())
        seconds.sort()
        gc.unfreeze()
        median, p99 = seconds[len(seconds) // 2], seconds[int(0.99 * len(seconds))]
        mean = sum(seconds) / len(seconds)
        return f"{1000 * median:.2f} ms ({1000 * mean:.2f} mean, {1000 * p99:.2f} p99)"

    def _plan(self) -> float:
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        elapsed = time.perf_counter() - start
        if plan is None:
            raise RuntimeError("the scheduler found nothing to do")
        self._pending.append(self._worker.execute(plan, 0.0))
        return elapsed


def _blocks(tokens: int) -> int:
    return tokens // _BLOCK_SIZE + 2


def _request(index: int, length: int) -> GenerateRequest:
    """A prompt that begins as no other index's does; a longer one of the same index begins with a shorter one."""
    prompt = [index, *((index + position) % _VOCAB_SIZE for position in range(length - 1))]
    return GenerateRequest(
        request_id=f"{index}/{length}",
        prompt_token_ids=prompt,
        work=Work(SamplingParams(max_tokens=_ROOM, seed=index)),
    )
