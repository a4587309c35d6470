# SPDX-License-Identifier: Apache-2.0
"""Stands in for the engine: makes step plans by hand for a runner in this process."""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.segments import ColdSegment
from pagoda.messages.spans import EmbeddedSpan
from pagoda.messages.transfers import HostSlots, TierBlocks
from pagoda.messages.worker import NewBlocks, SlotStart, StepPlan, StepResult, WorkerReady
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=10_000)


def load_config(config: WorkerConfig) -> tuple[Runner, WorkerReady]:
    """A worker that is the only one."""
    runner, ready, *_ = load_runner(plan_worker(config), Tracer("worker"))
    assert isinstance(runner, Runner)
    return runner, ready


def load(directory: Path | str, **options: Any) -> Runner:
    defaults: dict[str, Any] = {"num_blocks": 512, "max_num_seqs": 64, "num_threads": 1}
    runner, _ = load_config(WorkerConfig(model=str(directory), **defaults | options))
    return runner


class Submitted(Protocol):
    def result(self) -> StepResult: ...


class Steps(Protocol):
    def submit(self, plan: StepPlan) -> Submitted: ...


class Driver:
    """Requests in the slots of a runner, their blocks taken from the end of a pool."""

    def __init__(self, runner: Steps, *, num_blocks: int = 512, block_size: int = 16) -> None:
        self.runner = runner
        self.block_size = block_size
        self.results: list[StepResult] = []
        self.tokens: dict[int, list[int]] = {}
        self.num_prompt_tokens: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[list[int]]] = {}
        """Block table of each KV group, by slot."""
        self._pool = deque(range(num_blocks - 1, -1, -1))
        self._starts: list[SlotStart] = []
        self._freed: list[int] = []
        self._cold: list[ColdSegment] = []
        self._step = 0

    def start(
        self,
        slot: int,
        prompt: list[int],
        sampling: SamplingParams = GREEDY,
        *,
        output: list[int] | None = None,
        eos_token_ids: tuple[int, ...] = (),
        num_computed: int = 0,
        spans: tuple[EmbeddedSpan, ...] = (),
    ) -> None:
        """KV of `num_computed` tokens is to be in the slot's blocks before the next step."""
        self.tokens[slot] = prompt + list(output or [])
        self.num_prompt_tokens[slot] = len(prompt)
        self.computed[slot] = num_computed
        count = len(self.tokens[slot])
        self.blocks[slot] = [self.take(-(-count // size)) for size in self._block_sizes()]
        self._starts.append(
            SlotStart(
                slot=slot,
                token_ids=list(self.tokens[slot]),
                num_prompt_tokens=len(prompt),
                num_computed_tokens=num_computed,
                block_ids=[list(table) for table in self.blocks[slot]],
                work=Work(sampling, eos_token_ids=eos_token_ids, spans=spans),
                request_id=f"request-{slot}",
            )
        )

    def take(self, count: int) -> list[int]:
        return [self._pool.popleft() for _ in range(count)]

    def _block_sizes(self) -> list[int]:
        """Tokens of a block of each KV group."""
        runner = self.runner
        return runner.batch.block_sizes if isinstance(runner, Runner) else [self.block_size]

    @property
    def _keeps_states(self) -> bool:
        """Drafts that were right are computed again."""
        return isinstance(self.runner, Runner) and self.runner.batch.keeps_states

    def free(self, slot: int) -> None:
        self._freed.append(slot)
        for table in self.blocks.pop(slot):
            self._pool.extend(table)
        del self.tokens[slot], self.computed[slot]

    def cool(self, slot: int, group: int, place: HostSlots | TierBlocks) -> None:
        """The next segment of a slot lies there from the next step on."""
        self._cold.append(ColdSegment(slot, group, place))

    def output(self, slot: int) -> list[int]:
        return self.tokens[slot][self.num_prompt_tokens[slot] :]

    def step(
        self,
        shares: dict[int, int],
        drafts: dict[int, list[int]] | None = None,
        wanted: dict[int, int] | None = None,
    ) -> StepResult:
        """Computes `shares[slot]` tokens of each slot, the last of which are its `drafts`;
        `wanted[slot]` are to be proposed behind."""
        drafts = drafts or {}
        new_blocks = []
        for slot, count in shares.items():
            for group, (table, size) in enumerate(
                zip(self.blocks[slot], self._block_sizes(), strict=True)
            ):
                needed = -(-(self.computed[slot] + count) // size)
                new = self.take(needed - len(table))
                if new:
                    table += new
                    new_blocks.append(NewBlocks(slot, group, new))
        plan = StepPlan(
            self._step,
            list(shares),
            list(shares.values()),
            self._starts,
            new_blocks,
            self._freed,
            cold=self._cold,
            drafts=list(drafts.items()),
            proposals=list((wanted or {}).items()),
        )
        self._starts, self._freed, self._cold = [], [], []
        self._step += 1
        result = self.runner.submit(plan).result()
        for slot, count in shares.items():
            self.computed[slot] += count
        for slot, token_ids in zip(result.slots, result.token_ids, strict=True):
            self.tokens[slot] += token_ids
        for slot, draft in drafts.items():
            if self._keeps_states:
                self.computed[slot] -= len(draft)
            else:
                self.computed[slot] = len(self.tokens[slot]) - 1
        self.results.append(result)
        return result

    def share(self, slot: int, chunk: int) -> int:
        return min(chunk, len(self.tokens[slot]) - self.computed[slot])

    def run(self, slots: list[int], count: int, *, chunk: int = 10_000) -> None:
        """Steps until each slot has `count` output tokens, prompts cut into chunks."""
        while True:
            active = [slot for slot in slots if len(self.output(slot)) < count]
            if not active:
                return
            result = self.step({slot: self.share(slot, chunk) for slot in active})
            if result.errors:
                raise RuntimeError(f"Slots failed: {result.errors}")


def in_float64(model: Any) -> Any:
    """The same oracle in float64, whose experts are computed one by one, as joined products have no float64."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    return exact


def rounding(model: Any, exact: Any) -> float:
    """Largest difference of log-probabilities of an oracle from those of one in float64, of 20 at 40 places."""
    prompt = torch.randint(320, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        both = [it(prompt).logits[0].double().log_softmax(-1) for it in (model, exact)]
    likeliest = both[1].topk(20).indices
    return float((both[0] - both[1]).gather(1, likeliest).abs().max())


def answer_differences(runner: Runner, model: Any) -> Tensor:
    """Differences of log-probabilities from those of an oracle along an answer [8, 20]."""
    prompt = torch.randint(320, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    driver = Driver(runner)
    driver.start(0, prompt, SamplingParams(temperature=0, seed=0, max_tokens=100, logprobs=20))
    driver.run([0], 8)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + driver.output(0)])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 :]
    tops = [result.logprobs[0][0] for result in driver.results]
    ours = torch.tensor([top.top_logprobs for top in tops])
    theirs = expected[:-1].gather(1, torch.tensor([top.top_token_ids for top in tops]))
    return (ours - theirs).abs()
