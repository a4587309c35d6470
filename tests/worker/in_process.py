# SPDX-License-Identifier: Apache-2.0
"""A whole engine around a real runner, in this process: scheduler, KV manager, model and sampler, no sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from thread_group import ThreadGroups
from tiny_models import continuation
from transformers import PreTrainedModel

from benchmarks.drafters import AlwaysPays, FunctionDrafter
from pagoda.engine.core import EngineCore
from pagoda.engine.drafting.speculator import Speculator
from pagoda.engine.request import Request
from pagoda.engine.structured_output.grammars import Grammars
from pagoda.engine.structured_output.vocabulary import TokenTexts
from pagoda.executor.agreement import joined
from pagoda.executor.base import ExecutorEvent
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import GenerateRequest, TokenChunk, Work
from pagoda.messages.kv_groups import KVGroup
from pagoda.messages.load import LoadReport
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.speculation import OFF, SpeculativeConfig
from pagoda.messages.worker import StepPlan, TokenMasks
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.input_batch import MAX_STEPS
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner, StageRunner, Ticket
from pagoda.worker.stages import StageState

CONTEXT = 96
"""Tokens of the longest sequence of `engine`."""


def _result(ticket: Ticket[Any], before: StageState | None) -> Any:
    return ticket.result(before)


Answer = list[tuple[int, float]]
"""Tokens and their log-probabilities."""


class InProcessExecutor:
    """Computes a step once the next one is submitted, or when nothing else is left to do.

    Tensor-parallel ranks are threads, and stages take their turns.
    """

    def __init__(self, config: WorkerConfig) -> None:
        parallel = config.parallel
        self.max_in_flight = 2 if parallel.pipeline_parallel_size == 1 else 3
        self._plans: deque[StepPlan] = deque()
        """Plans that are not submitted yet."""
        self._tickets: deque[tuple[StepPlan, list[list[Ticket[Any]]]]] = deque()
        """Steps that are not computed yet, with their tickets by stage and rank."""
        self._masks: dict[int, TokenMasks] = {}
        self._pool = ThreadPoolExecutor(max_workers=parallel.stage_size)
        plans = [
            plan_worker(msgspec.structs.replace(config, place=place))
            for place in parallel.places(0)
        ]
        num_blocks = min(plan.num_blocks for plan in plans)
        self.stages: list[list[Runner | StageRunner]] = []
        for pp in range(parallel.pipeline_parallel_size):
            groups = ThreadGroups(parallel)
            loaded = [
                self._pool.submit(
                    load_runner,
                    plan,
                    Tracer("worker"),
                    groups.of(plan.config.place),
                    lambda _: num_blocks,
                    await_masks=self._await_masks,
                )
                for plan in plans
                if plan.config.place.pp == pp
            ]
            self.stages.append([future.result()[0] for future in loaded])
            self._ready = joined([future.result().ready for future in loaded], 0, parallel)
            groups.close()
        self._events: list[ExecutorEvent] = []

    def start(self, num_blocks: int | None = None) -> None:  # noqa: ARG002 - never started again
        self._events.append(self._ready)

    def _await_masks(self, step: int) -> TokenMasks:
        return self._masks.pop(step)

    def submit_masks(self, masks: TokenMasks) -> None:
        self._masks[masks.step] = masks

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._submit()

    def _submit(self) -> None:
        while self._plans and (len(self._tickets) < MAX_STEPS or self._compute()):
            plan = self._plans.popleft()
            tickets = [[runner.submit(plan) for runner in stage] for stage in self.stages]
            self._tickets.append((plan, tickets))

    def _compute(self) -> bool:
        """Computes the oldest step; False if there is none, or it needs masks that are not there."""
        if not self._tickets:
            return False
        plan, (*stages, last) = self._tickets[0]
        if plan.masked_slots and plan.step not in self._masks:
            return False
        states: list[StageState | None] = [None] * len(last)
        for stage in stages:
            computed = self._pool.map(_result, stage, states)
            states = [replace(state, hidden=state.hidden.clone()) for state in computed]
        results = list(self._pool.map(_result, last, states))
        for result in results:
            assert (result.slots, result.token_ids) == (results[0].slots, results[0].token_ids)
        self._events.append(results[0])
        self._tickets.popleft()
        return True

    def poll(self) -> list[ExecutorEvent]:
        if not self._events and self._compute():
            self._submit()
        events, self._events = self._events, []
        return events

    def pollables(self) -> list[object]:
        return []

    def next_event_at(self) -> float | None:
        return None

    def close(self) -> None:
        self._pool.shutdown()


class InProcessEngine:
    """An engine that answers requests from first to last."""

    def __init__(
        self,
        directory: Path,
        *,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = False,
        token_texts: TokenTexts | None = None,
        speculation: SpeculativeConfig = OFF,
        **options: Any,
    ) -> None:
        """`options` are fields of `WorkerConfig`; grammars are over `token_texts`. All drafts of `speculation` are
        computed."""
        sizes = {"num_blocks": 512, "block_size": 16, "max_num_seqs": 16, "num_threads": 1}
        drafter = speculation.drafter
        worker = WorkerConfig(model=str(directory), drafter=drafter, **sizes | options)
        config = EngineConfig(
            worker=worker,
            max_num_seqs=16,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            speculation=speculation,
        )
        self._core = EngineCore(
            config,
            InProcessExecutor(worker),
            VirtualClock(),
            open_grammars=lambda _, vocab_size: Grammars(
                lambda: cast(TokenTexts, token_texts), vocab_size, run=lambda work: work()
            ),
        )
        self._core.step()
        assert self._core.scheduler is not None
        speculator = self._core.scheduler.batcher.speculator
        if speculator is not None:
            speculator.costs = AlwaysPays()

    def draft_with(self, drafter: Callable[[Request], list[int]]) -> None:
        """Asks before each plan what may follow the tokens of requests; all of it is computed."""
        scheduler = self._core.scheduler
        assert scheduler is not None
        scheduler.batcher.speculator = Speculator(FunctionDrafter(drafter), 8, AlwaysPays())

    def answers_with_logprobs(self, requests: Sequence[GenerateRequest]) -> dict[str, Answer]:
        """The output tokens of requests that arrive together, with their log-probabilities, by request."""
        answers: dict[str, Answer] = {request.request_id: [] for request in requests}
        for chunk in self.chunks(requests):
            reported = [token.logprob for token in chunk.logprobs or []]
            answers[chunk.request_id] += zip(chunk.token_ids, reported, strict=True)
        return answers

    def answer(self, requests: list[GenerateRequest]) -> list[list[int]]:
        """The output tokens of requests that arrive together.

        Raises:
            RuntimeError: one of them failed.
        """
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for chunk in self.chunks(requests):
            tokens[chunk.request_id] += chunk.token_ids
        return list(tokens.values())

    def log_probabilities(self, requests: list[GenerateRequest]) -> list[dict[int, float]]:
        """Log-probabilities that requests for one token, with `logprobs`, have asked for."""
        found: dict[str, dict[int, float]] = {request.request_id: {} for request in requests}
        for chunk in self.chunks(requests):
            for top in chunk.logprobs or []:
                pairs = zip(top.top_token_ids, top.top_logprobs, strict=True)
                found[chunk.request_id] |= dict(pairs)
        return list(found.values())

    def chunks(self, requests: Sequence[GenerateRequest]) -> Iterator[TokenChunk]:
        for request in requests:
            refused = self._core.add(request)
            if isinstance(refused, list) and any(chunk.error is not None for chunk in refused):
                raise RuntimeError(refused[0].error)
        running = {request.request_id for request in requests}
        while running:
            for chunk in self._core.step():
                if chunk.error is not None:
                    raise RuntimeError(chunk.error)
                yield chunk
                if chunk.finish_reason is not None:
                    running.discard(chunk.request_id)

    def load(self) -> LoadReport:
        return self._core.load()

    @property
    def gives_back(self) -> bool:
        """True if some layers have a window, so that requests hold little of what is behind it."""
        return not all(group.keeps_all for group in self.kv_groups)

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        assert self._core.scheduler is not None
        return self._core.scheduler.kv.groups


def assert_answers(found: dict[str, Answer], expected: Sequence[Answer]) -> None:
    """Answers of requests that are named by their places have the expected tokens, and log-probabilities within
    5e-5."""
    for index, answer in enumerate(expected):
        own = found[str(index)]
        assert [token for token, _ in own] == [token for token, _ in answer]
        reported, exact = (torch.tensor([it for _, it in each]) for each in (own, answer))
        torch.testing.assert_close(reported, exact, atol=5e-5, rtol=0)


def engine(
    directory: Path,
    backend: str,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    *,
    experts: bool = False,
    **options: Any,
) -> InProcessEngine:
    """An engine over the ranks of a topology, for short sequences."""
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        context_parallel_size=cp,
        expert_parallel=experts,
    )
    return InProcessEngine(
        directory, backend=backend, max_model_len=CONTEXT, parallel=parallel, **options
    )


@dataclass(frozen=True)
class Oracle:
    """A saved model, and the greedy answers of transformers to some requests."""

    directory: Path
    requests: list[GenerateRequest]
    expected: list[list[int]]


def save_oracle(
    directory: Path, model: PreTrainedModel, prompts: list[list[int]], length: int
) -> Oracle:
    """Saves a model, and has it answer each prompt with `length` tokens."""
    model.save_pretrained(directory)
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=length)
    requests = [
        GenerateRequest(request_id=str(i), prompt_token_ids=prompt, work=Work(sampling))
        for i, prompt in enumerate(prompts)
    ]
    return Oracle(directory, requests, [continuation(model, p, length) for p in prompts])
