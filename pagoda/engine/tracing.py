# SPDX-License-Identifier: Apache-2.0
"""The engine's part of a trace: its loop, the steps under way, and the rows of requests."""

from __future__ import annotations

from typing import Any

from pagoda.engine.request_tracing import RequestRows
from pagoda.engine.scheduler import Scheduler
from pagoda.messages.tracing import StartTrace, TraceStopped
from pagoda.messages.worker import StepPlan, StepResult
from pagoda.telemetry.trace_ending import TraceEnding
from pagoda.telemetry.tracer import Tracer

_COUNTERS_NS = 50_000_000
"""Counters are written this far apart at least, but for the last before the engine sleeps."""


class EngineTracing:
    """Tracing of one engine. Methods with `began`, from `tracer.e2e()`, are called only if it is not 0."""

    def __init__(self, tracer: Tracer, max_in_flight: int) -> None:
        self.tracer = tracer
        self._ending = TraceEnding(tracer)
        self._requests = RequestRows(tracer)
        self._max_in_flight = max_in_flight
        self._step_rows: list[int] = []
        self._steps: dict[int, tuple[int, dict[str, Any]]] = {}
        """Steps in flight: when each was handed over, and its arguments in the trace."""
        self._scheduler: Scheduler | None = None
        self._steps_left: int | None = None
        self._number = 0
        """`StartTrace.number` of the trace."""
        self._awaits_workers = False
        self._workers_problems: list[str] = []
        """Reasons why fragments of workers lack something."""
        self._num_hit_tokens = 0
        self._counted_at: int | None = None
        self._counted_idle = False

    # ---- on and off

    def start(self, order: StartTrace, scheduler: Scheduler | None) -> None:
        self._end_rows()
        self._ending.forget()
        self.tracer.start(order.session)
        self._steps_left = order.num_steps
        self._number = order.number
        self._awaits_workers = False
        self._counted_at = None
        rows = range(self._max_in_flight)
        self._step_rows = [self.tracer.open_row(f"steps {index}") for index in rows]
        if scheduler is not None:
            self.watch(scheduler)

    def watch(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_hit_tokens = scheduler.counters.num_prefix_hit_tokens
        scheduler.trace(self._requests)

    def await_workers(self) -> None:
        self._awaits_workers = True

    def on_workers_stopped(self, workers: TraceStopped) -> None:
        """The workers have closed their fragments, or are lost. This process closes its own in a thread."""
        if self._awaits_workers:
            self._awaits_workers = False
            self._workers_problems = workers.problems
            self._end_rows()
            self._ending.begin()

    def _end_rows(self) -> None:
        self._steps_left = None
        if self._scheduler is not None:
            self._scheduler.trace(None)
            self._scheduler = None
        self._requests.close()
        self._end_steps(cut=True)
        for row in self._step_rows:
            self.tracer.close_row(row)
        self._step_rows = []

    def drain_end(self) -> TraceStopped | None:
        """The end of a trace whose fragments are closed now; None without one."""
        problems = self._ending.take()
        if problems is None:
            return None
        return TraceStopped([*problems, *self._workers_problems], self._number)

    def pollables(self) -> list[object]:
        return self._ending.pollables

    def close(self) -> None:
        self._end_rows()
        self._ending.close()

    def count_step(self) -> bool:
        """A step has ended; whether it is the last one that is to be traced, or can be."""
        if self._steps_left is None:
            return False
        self._steps_left -= 1
        if self._steps_left and self.tracer.session is not None:
            return False
        self._steps_left = None
        return True

    # ---- what the engine does

    def scheduled(self, began: int, plan: StepPlan, scheduler: Scheduler) -> None:
        starts = {start.slot for start in plan.starts}
        shares = list(zip(plan.slots, plan.num_tokens, strict=True))
        num_decodes = sum(count == 1 and slot not in starts for slot, count in shares)
        num_tokens = sum(plan.num_tokens)
        num_hits = scheduler.counters.num_prefix_hit_tokens
        args = {
            "step": plan.step,
            "tokens": num_tokens,
            "prefill_tokens": num_tokens - num_decodes,
            "decodes": num_decodes,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free_blocks": scheduler.kv.pool.num_available,
            "hit_tokens": num_hits - self._num_hit_tokens,
        }
        self._num_hit_tokens = num_hits
        self.tracer.span("schedule", began, args)

    def submitted(self, began: int, plan: StepPlan) -> None:
        now = self.tracer.clock_ns()
        self.tracer.span("submit", began, {"step": plan.step}, ended=now)
        rows, tokens = self._requests.of_slots(plan.slots, plan.num_tokens)
        args: dict[str, Any] = {"step": plan.step, "rows": rows, "tokens": tokens}
        if plan.drafts:
            args["drafts"] = sum(len(token_ids) for _, token_ids in plan.drafts)
        self._steps[plan.step] = (now, args)

    def updated(self, began: int, result: StepResult) -> None:
        """`began` is when the result was taken."""
        self.tracer.span("update", began, {"step": result.step})
        step = self._steps.pop(result.step, None)
        if step is None:
            return
        handed_over, args = step
        if "drafts" in args:
            args["accepted"] = sum(map(len, result.token_ids)) - len(result.token_ids)
        if result.forward_time_s:
            args |= {
                "prepare_ms": result.prepare_time_s * 1e3,
                "forward_ms": result.forward_time_s * 1e3,
                "sample_ms": result.sample_time_s * 1e3,
            }
        self._end_step(result.step, handed_over, args, ended=began)

    def worker_lost(self, reason: str) -> None:
        self.tracer.instant("worker lost", {"reason": reason})
        self._end_steps(lost=True)

    def _end_steps(self, **notes: bool) -> None:
        now = self.tracer.clock_ns()
        for step, (handed_over, args) in self._steps.items():
            self._end_step(step, handed_over, args | notes, ended=now)
        self._steps.clear()

    def _end_step(self, step: int, handed_over: int, args: dict[str, Any], ended: int) -> None:
        if self._step_rows:
            row = self._step_rows[step % len(self._step_rows)]
            self.tracer.span("step", handed_over, args, row=row, ended=ended)

    def count(self, scheduler: Scheduler) -> None:
        """Writes the numbers of requests and blocks, at most every 50 ms and when no request is left."""
        now, is_idle = self.tracer.clock_ns(), not scheduler.requests
        is_recent = self._counted_at is not None and now - self._counted_at < _COUNTERS_NS
        if is_recent and (not is_idle or self._counted_idle):
            return
        self._counted_at, self._counted_idle = now, is_idle
        counts = {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
        self.tracer.counter("requests", counts)
        pool = scheduler.kv.pool
        free, cached = pool.num_available - pool.num_evictable, pool.num_evictable
        blocks = {"used": pool.num_blocks - pool.num_available, "cached": cached, "free": free}
        self.tracer.counter("kv blocks", blocks)
