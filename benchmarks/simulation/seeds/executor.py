# SPDX-License-Identifier: Apache-2.0
"""A simulated executor whose worker dies, hangs and computes NaN when the life says so, and that checks plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.simulation.books import require
from benchmarks.simulation.seeds.draw import STEP_TIMEOUT_S, WORKER_POISON
from pagoda.engine.batching import SchedulerLimits
from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.ipc.clock import Clock
from pagoda.messages.adapters import Adapter
from pagoda.messages.transfers import Transfers
from pagoda.messages.worker import StepPlan, StepResult, TokenMasks
from pagoda.plugins.sim.executor import SimExecutor
from pagoda.telemetry.tracer import TraceSession

NAN = "The logits of this request were not numbers."


def client_id(engine_id: str) -> str:
    """The id that the client gave the request: engines, hosts and prefill routers add to it."""
    return engine_id.partition("#")[0].partition("/")[0]


class FaultyExecutor:
    """An `Executor`."""

    def __init__(
        self,
        inner: SimExecutor,
        clock: Clock,
        nan_at: dict[str, int],
        limits: Callable[[], SchedulerLimits | None],
        on_loss: Callable[[], None],
    ) -> None:
        """`nan_at` has the output positions at which requests have no logits, by the ids of clients. `on_loss` is
        called whenever a worker is lost."""
        self._inner = inner
        self._clock = clock
        self._nan_at = nan_at
        self._limits = limits
        self._on_loss = on_loss
        self._requests: dict[int, str] = {}
        """Ids of clients by slot."""
        self._hangs_until = 0.0
        self._dies_at: float | None = None
        self._reason = ""
        self.max_in_flight = inner.max_in_flight

    # ---- faults

    def die(self) -> None:
        """The worker ends now."""
        self._dies_at, self._reason = self._clock.now(), "the worker was killed"

    def hang(self, for_s: float) -> None:
        """The worker answers nothing for so long; what it would have said comes then."""
        now = self._clock.now()
        self._hangs_until = max(self._hangs_until, now + for_s)
        if for_s > STEP_TIMEOUT_S and self._inner.next_event_at() is not None:
            self._dies_at, self._reason = now + STEP_TIMEOUT_S, "a step took too long"

    # ---- Executor

    def start(self, num_blocks: int | None = None) -> None:
        self._dies_at, self._hangs_until = None, 0.0
        self._requests.clear()
        self._inner.start(num_blocks)
        worker = self._inner.worker
        execute = worker.execute

        def execute_and_spoil(plan: StepPlan, cost_s: float) -> StepResult:
            for start in plan.starts:
                self._requests[start.slot] = client_id(start.request_id)
            result = execute(plan, cost_s)
            for slot_id, number in zip(plan.slots, plan.num_tokens, strict=True):
                slot = worker.slots[slot_id]
                end = slot.num_computed_tokens
                if WORKER_POISON in slot.token_ids[end - number : min(end, slot.num_prompt_tokens)]:
                    self._dies_at, self._reason = self._clock.now(), "the worker was poisoned"
            self._spoil(result)
            return result

        worker.execute = execute_and_spoil  # type: ignore[method-assign]

    def _spoil(self, result: StepResult) -> None:
        """Replaces samples by errors where the life says that logits are NaN."""
        for index in reversed(range(len(result.slots))):
            slot_id = result.slots[index]
            nan_at = self._nan_at.get(self._requests[slot_id])
            slot = self._inner.worker.slots[slot_id]
            if nan_at is not None and len(slot.token_ids) - slot.num_prompt_tokens > nan_at:
                del result.slots[index], result.token_ids[index]
                result.logprobs.pop(slot_id, None)
                result.errors[slot_id] = NAN

    def submit(self, plan: StepPlan) -> None:
        limits = self._limits()
        num_tokens = sum(plan.num_tokens)
        if limits is not None:
            require(0 < num_tokens <= limits.max_num_batched_tokens, "A plan exceeds its budget.")
            require(len(plan.slots) <= limits.max_num_seqs, "A plan has too many sequences.")
        require(len(plan.slots) == len(set(plan.slots)), "A plan names a slot twice.")
        require(min(plan.num_tokens) >= 1, "A plan gives a slot no token.")
        self._inner.submit(plan)

    def submit_masks(self, masks: TokenMasks) -> None:
        self._inner.submit_masks(masks)

    def submit_transfers(self, message: Transfers) -> None:
        self._inner.submit_transfers(message)

    def load_adapter(self, adapter: Adapter) -> None:
        self._inner.load_adapter(adapter)

    def unload_adapter(self, digest: str) -> None:
        self._inner.unload_adapter(digest)

    def start_trace(self, session: TraceSession) -> None:
        self._inner.start_trace(session)

    def stop_trace(self) -> None:
        self._inner.stop_trace()

    def poll(self) -> list[ExecutorEvent]:
        now = self._clock.now()
        if self._dies_at is not None and now >= self._dies_at:
            self._dies_at = None
            self._inner.close()
            self._on_loss()
            return [WorkerLost(self._reason)]
        return [] if now < self._hangs_until else self._inner.poll()

    def pollables(self) -> list[Any]:
        return []

    def pids(self) -> dict[str, int]:
        return {}

    def next_event_at(self) -> float | None:
        upcoming = self._inner.next_event_at()
        if upcoming is not None:
            upcoming = max(upcoming, self._hangs_until)
        if self._dies_at is None:
            return upcoming
        return self._dies_at if upcoming is None else min(self._dies_at, upcoming)

    def close(self) -> None:
        self._inner.close()
