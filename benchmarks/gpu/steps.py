# SPDX-License-Identifier: Apache-2.0
"""A worker's steps without the engine: prompts in chunks, then a token of each request, two steps under way."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.idle import Clock, busy_seconds, idle_share
from pagoda.checkpoints.resolve import load_model_config
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import LoadedWorker, load_runner, plan_worker
from pagoda.worker.runner import Runner

_SAMPLING = SamplingParams(temperature=0.0, seed=0, max_tokens=100_000, ignore_eos=True)
BLOCK = 16
CHUNK = 8192
"""Tokens of a step of prompts."""


@dataclass(frozen=True)
class Decoded:
    tokens_per_s: float
    seconds: float
    """Seconds of a step."""
    idle: float | None
    """Share of the time in which the device had nothing to do; None if steps cannot be launched ahead."""


class Requests:
    """Requests of random tokens in the slots of a runner, with blocks for all that they will say."""

    def __init__(self, worker: LoadedWorker, clock: Clock[Any]) -> None:
        if not isinstance(worker.runner, Runner):
            raise TypeError("A worker that is alone has all stages.")
        self._runner, self._clock = worker.runner, clock
        self._vocab_size = worker.ready.vocab_size
        self._step = 0
        self._running: list[int] = []
        self._under_way: deque[Any] = deque()

    def prefill(self, count: int, length: int, room: int) -> float:
        """Computes prompts of `length` tokens, with blocks for `room` further ones; seconds that it takes."""
        blocks = -(-(length + room) // BLOCK)
        generator = torch.Generator().manual_seed(count)
        freed, self._running = self._running, list(range(count))
        starts = [
            SlotStart(
                slot,
                torch.randint(self._vocab_size, (length,), generator=generator).tolist(),
                length,
                0,
                [[*range(slot * blocks, (slot + 1) * blocks)]],
                Work(_SAMPLING),
            )
            for slot in self._running
        ]
        left = dict.fromkeys(self._running, length)
        began = time.perf_counter()
        while left:
            shares, budget = {}, CHUNK
            for slot, tokens in left.items():
                if budget > 0:
                    shares[slot] = min(tokens, budget)
                    budget -= shares[slot]
            left = {slot: n - shares.get(slot, 0) for slot, n in left.items()}
            left = {slot: n for slot, n in left.items() if n}
            plan = StepPlan(self._step, [*shares], [*shares.values()], starts, freed_slots=freed)
            self._step, starts, freed = self._step + 1, [], []
            self._runner.submit(plan).result()
        return time.perf_counter() - began

    def decode(self, steps: int) -> Decoded:
        """A token of every request in each step, the next of which is launched before this one is read."""
        busy = [self._busy_seconds()]
        ends = []
        began = time.perf_counter()
        for _ in range(steps):
            self._launch()
            ends.append(self._clock.mark())
            self._read(but=1)
        self._read()
        seconds = time.perf_counter() - began
        busy.append(self._busy_seconds())
        known = [each for each in busy if each is not None]
        idle = idle_share(self._clock, ends, sum(known) / len(known)) if len(known) == 2 else None
        return Decoded(len(self._running) * steps / seconds, seconds / steps, idle)

    def _busy_seconds(self) -> float | None:
        return busy_seconds(self._clock, self._launch, self._read)

    def _launch(self) -> bool:
        """Launches a token of every request. Returns False if it is computed only when it is read."""
        count = len(self._running)
        ticket = self._runner.submit(StepPlan(self._step, self._running, [1] * count))
        self._step += 1
        self._under_way.append(ticket)
        return ticket.launch() is not None

    def _read(self, but: int = 0) -> None:
        """Reads the results of all steps under way but the last few."""
        while len(self._under_way) > but:
            self._under_way.popleft().result()


def load(
    model: str, dtype: str, *, max_num_seqs: int, max_model_len: int, batch_invariant: bool
) -> LoadedWorker:
    """A model of random weights on the first GPU.

    Raises ConfigError: it does not fit, or its products are no quicker where they may depend on the batch."""
    config = WorkerConfig(
        model=model,
        load_format="dummy",
        backend="cuda",
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=CHUNK,
        block_size=BLOCK,
        memory_utilization=0.9,
        batch_invariant=batch_invariant,
    )
    return load_runner(plan_worker(config), Tracer("worker"))


def attention_flops(model: str, length: int) -> int:
    """Operations of attention over a prompt of `length` tokens, each of which sees all before it."""
    spec = load_model_config(model, "dummy")
    return 2 * length**2 * spec.num_heads * spec.head_dim * len(spec.layers)
