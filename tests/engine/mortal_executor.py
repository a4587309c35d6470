# SPDX-License-Identifier: Apache-2.0
"""Material of whole lives of an engine: requests of all kinds, and a worker that is lost now and then."""

from __future__ import annotations

import random
from typing import Any

from harness import VOCAB_SIZE, Harness
from small_grammars import GRAMMARS

from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import StepPlan, StepResult
from pagoda.plugins.sim.executor import SimExecutor

POISON = VOCAB_SIZE + 1


class MortalExecutor:
    """A simulated executor whose worker is lost at random instants, with every step under way.

    And it is lost, every time, in a step that computes a `POISON` token.
    """

    def __init__(
        self, inner: SimExecutor, clock: VirtualClock, rng: random.Random, rate: float
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._rng = rng
        self._rate = rate
        self._death_at: float | None = None

    def start(self, num_blocks: int | None = None) -> None:
        self._death_at = (
            self._clock.now() + self._rng.expovariate(self._rate) if self._rate else None
        )
        self._inner.start(num_blocks)
        worker = self._inner.worker
        execute = worker.execute

        def execute_and_look(plan: StepPlan, cost_s: float) -> StepResult:
            result = execute(plan, cost_s)
            for slot_id, count in zip(plan.slots, plan.num_tokens, strict=True):
                slot = worker.slots[slot_id]
                end = slot.num_computed_tokens
                if POISON in slot.token_ids[end - count : end]:
                    self._death_at = self._clock.now()
            return result

        worker.execute = execute_and_look  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> list[ExecutorEvent]:
        events = self._inner.poll()
        is_idle = not events and self._inner.next_event_at() is None
        if self._death_at is not None and self._clock.now() >= self._death_at and not is_idle:
            self._death_at = None
            self._inner.close()
            events.append(WorkerLost("the simulated worker was lost"))
        return events

    def next_event_at(self) -> float | None:
        upcoming = self._inner.next_event_at()
        if upcoming is None:
            return None  # an idle worker may live on
        return min(upcoming, self._death_at) if self._death_at is not None else upcoming


class SpeakingExecutor(MortalExecutor):
    """A simulated executor that says what it is told to, and loses its worker then if that is what it says."""

    def __init__(self, inner: SimExecutor, clock: VirtualClock) -> None:
        super().__init__(inner, clock, random.Random(), 0.0)
        self._words: list[ExecutorEvent] = []
        self.starts: list[int | None] = []

    def start(self, num_blocks: int | None = None) -> None:
        self.starts.append(num_blocks)
        super().start(num_blocks)

    def say(self, event: ExecutorEvent) -> None:
        self._words.append(event)

    def poll(self) -> list[ExecutorEvent]:
        words, self._words = self._words, []
        if any(isinstance(word, WorkerLost) for word in words):
            self._inner.close()
        return words + self._inner.poll()


def speaking(**fields: object) -> tuple[Harness, SpeakingExecutor]:
    made: list[SpeakingExecutor] = []

    def wrap(inner: SimExecutor, clock: VirtualClock) -> SpeakingExecutor:
        made.append(SpeakingExecutor(inner, clock))
        return made[0]

    return Harness(wrap=wrap, **fields), made[0]  # type: ignore[arg-type]


def random_request(rng: random.Random, index: int, max_model_len: int) -> GenerateRequest:
    poison = [POISON] if rng.random() < 0.03 else []
    shared = [rng.randrange(2)] * rng.choice([0, 4, 8, 12])
    prompt = shared + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
    prompt[len(shared) : len(shared)] = poison
    min_tokens = rng.choice([0, 0, 3])
    return GenerateRequest(
        request_id=f"r{index}",
        prompt_token_ids=prompt[: max_model_len - 1],
        work=Work(
            SamplingParams(
                seed=rng.randrange(2**63),
                max_tokens=rng.randint(max(1, min_tokens), 30),
                min_tokens=min_tokens,
                stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 1]))),
            ),
            eos_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 1, 2]))),
        ),
        priority=rng.choice([0, 0, 0, 1, -1]),
        cache_salt=rng.choice([None, None, "salt"]),
        grammar=None if poison or index % 3 else GRAMMARS[index // 3 % len(GRAMMARS)],
    )
