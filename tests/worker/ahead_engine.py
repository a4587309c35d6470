# SPDX-License-Identifier: Apache-2.0
"""Stands in for an engine that plans each step before it hears of the one before, and launches it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pagoda.backend.kv_store import DeviceEvent
from pagoda.faults.injector import Faults
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import NewBlocks, SlotStart, StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker import loading
from pagoda.worker.runner import Runner, Ticket

NUM_BLOCKS = 64


def load_worker(
    directory: Path, backend: Any, monkeypatch: pytest.MonkeyPatch, faults: Faults | None = None
) -> loading.LoadedWorker:
    """A worker that is alone, on a backend of this process."""
    monkeypatch.setattr(loading, "choose_backend", lambda *_: (backend, "test"))
    config = WorkerConfig(
        model=str(directory), num_blocks=NUM_BLOCKS, max_num_seqs=8, num_threads=1
    )
    return loading.load_runner(loading.plan_worker(config), Tracer("worker"), faults=faults)


def load(
    directory: Path, backend: Any, monkeypatch: pytest.MonkeyPatch, faults: Faults | None = None
) -> Runner:
    """The runner of `load_worker`."""
    runner = load_worker(directory, backend, monkeypatch, faults).runner
    assert isinstance(runner, Runner)
    return runner


@dataclass(frozen=True)
class _UnderWay:
    ticket: Ticket[StepResult]
    names: dict[int, str]
    """Requests by slot."""
    done: DeviceEvent | None
    """None of a step that was not launched ahead."""


@dataclass
class Engine:
    """Submits and launches each step before it takes the result of the one before."""

    runner: Runner
    answers: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    expert_tokens: list[list[int]] = field(default_factory=list)
    """Tokens that went to each expert, step by step."""
    num_ahead: int = 0
    """Steps that were launched behind one whose result had not been read."""
    num_at_once: int = 0
    """Those of them that were launched before the device had ended the one in front."""
    _names: dict[int, str] = field(default_factory=dict)
    _computed: dict[int, int] = field(default_factory=dict)
    _blocks: dict[int, list[list[int]]] = field(default_factory=dict)
    """Block table of each KV group, by slot."""
    _starts: list[SlotStart] = field(default_factory=list)
    _freed: list[int] = field(default_factory=list)
    _under_way: deque[_UnderWay] = field(default_factory=deque)
    _step: int = 0
    _pool: deque[int] = field(default_factory=lambda: deque(range(NUM_BLOCKS)))

    def start(
        self,
        slot: int,
        name: str,
        prompt: list[int],
        sampling: SamplingParams,
        output: tuple[int, ...] = (),
    ) -> None:
        """Puts a request into a slot; it has said `output` already."""
        tables: list[list[int]] = [[] for _ in self.runner.batch.block_sizes]
        self._names[slot], self._computed[slot], self._blocks[slot] = name, 0, tables
        tokens, empty = [*prompt, *output], [[] for _ in tables]
        self._starts.append(
            SlotStart(slot, tokens, len(prompt), 0, empty, Work(sampling), request_id=name)
        )

    def free(self, slot: int) -> None:
        """The next plan frees the slot, and blocks that it had are the first to be given away."""
        self._freed.append(slot)
        for table in self._blocks.pop(slot):
            self._pool.extendleft(table)

    def submit(self, shares: dict[int, int]) -> None:
        """Submits a step of so many tokens of slots. Raises what launching it does, behind the results before."""
        blocks = []
        for slot, count in shares.items():
            self._computed[slot] += count
            for group, (table, size) in enumerate(
                zip(self._blocks[slot], self.runner.batch.block_sizes, strict=True)
            ):
                wanted = -(-self._computed[slot] // size) - len(table)
                if wanted:
                    new = [self._pool.popleft() for _ in range(wanted)]
                    blocks.append(NewBlocks(slot, group, new))
                    table += new
        plan = StepPlan(
            self._step, [*shares], [*shares.values()], self._starts, blocks, self._freed
        )
        self._starts, self._freed = [], []
        self._step += 1
        ticket = self.runner.submit(plan)
        try:
            done = ticket.launch()
        except Exception:
            self.finish()
            raise
        names = {slot: self._names[slot] for slot in shares}
        self._under_way.append(_UnderWay(ticket, names, done))
        if len(self._under_way) == 2:
            before = self._under_way[0].done
            self.num_ahead += done is not None
            self.num_at_once += done is not None and before is not None and not before.done
            self.take()

    def take(self) -> None:
        step = self._under_way.popleft()
        result, names = step.ticket.result(), step.names
        for slot, token_ids in zip(result.slots, result.token_ids, strict=True):
            if names[slot] in self.errors:  # it was under way, and its slot is free already
                continue
            self.answers.setdefault(names[slot], []).extend(token_ids)
        for slot, reports in result.logprobs.items():
            self.logprobs.setdefault(names[slot], []).extend(one.logprob for one in reports)
        self.errors |= {names[slot]: error for slot, error in result.errors.items()}
        self.expert_tokens.append(result.expert_tokens)

    def finish(self) -> Engine:
        while self._under_way:
            self.take()
        return self
