# SPDX-License-Identifier: Apache-2.0
"""A row of the trace for each request in the engine: phases without a gap, within one span of the whole request.

Tracing may begin and end in the middle of a request: its spans then are of what was seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.engine.request import Request, RequestState
from pagoda.messages.frontend import FinishReason
from pagoda.telemetry.tracer import Tracer

QUEUED, AWAITS_KV, PREFILL, DECODE = "queued", "waiting for KV", "prefill", "decode"
PREEMPTED, RECOVERING = "preempted", "recovering"


@dataclass(slots=True)
class _RequestRow:
    request: Request
    number: int
    began: int
    phase: str
    phase_began: int
    waits_as: str
    """The phase that waiting for a step counts as."""
    num_preemptions: int = 0


class RequestRows:
    """Writes a row of the trace for each request that the scheduler tells of."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._rows: dict[str, _RequestRow] = {}
        self._by_slot: dict[int, int] = {}

    def of_slots(self, slots: list[int], values: list[int]) -> tuple[list[int], list[int]]:
        """The rows of the requests in these slots, and the values beside them; unknown slots are left out."""
        rows, pairs = self._by_slot, list(zip(slots, values, strict=True))
        known = [(rows[slot], value) for slot, value in pairs if slot in rows]
        return [row for row, _ in known], [value for _, value in known]

    def moved(self, request: Request, before: RequestState, *, is_lost: bool = False) -> None:
        """The request has a new state; `is_lost` says that its KV is lost with the workers."""
        row = self._rows.get(request.request_id)
        if row is None:
            row = self._open(request)
        elif request.state is RequestState.WAITING:
            if is_lost:
                row.waits_as = RECOVERING
            elif before is RequestState.RUNNING:
                self._tracer.instant("preempted", {"request": request.request_id})
                row.num_preemptions += 1
                row.waits_as = PREEMPTED
            self._enter(row, row.waits_as)
        elif request.is_awaiting_kv:
            row.waits_as = (
                QUEUED  # behind that it waits for a step: it was preempted before, and once
            )
            self._enter(row, AWAITS_KV)
        elif request.state is RequestState.RUNNING:
            self._enter(row, PREFILL)
        if request.slot is not None:
            self._by_slot[request.slot] = row.number

    def sampled(self, request: Request) -> None:
        row = self._rows.get(request.request_id)
        if row is not None and row.phase == PREFILL:
            self._enter(row, DECODE)

    def ended(self, request: Request, reason: FinishReason) -> None:
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._close(row, reason)

    def close(self) -> None:
        """Tracing ends."""
        for row in self._rows.values():
            self._close(row, "")
        self._rows.clear()
        self._by_slot.clear()

    def _open(self, request: Request) -> _RequestRow:
        if request.is_awaiting_kv:
            phase = AWAITS_KV
        elif request.state is RequestState.RUNNING:
            phase = DECODE if request.num_computed_tokens >= request.num_tokens - 1 else PREFILL
        else:
            phase = PREEMPTED if request.admission else QUEUED
        now = self._tracer.clock_ns()
        number = self._tracer.open_row(f"request {request.request_id}")
        waits_as = phase if phase == PREEMPTED else QUEUED
        row = self._rows[request.request_id] = _RequestRow(
            request, number, now, phase, now, waits_as
        )
        return row

    def _enter(self, row: _RequestRow, phase: str) -> None:
        if phase == row.phase:
            return
        now = self._tracer.clock_ns()
        self._tracer.span(row.phase, row.phase_began, row=row.number, ended=now)
        row.phase, row.phase_began = phase, now

    def _close(self, row: _RequestRow, finish_reason: str) -> None:
        now, request = self._tracer.clock_ns(), row.request
        self._tracer.span(row.phase, row.phase_began, row=row.number, ended=now)
        args = {
            "request": request.request_id,
            "prompt_tokens": request.num_prompt_tokens,
            "cached_tokens": request.num_cached_tokens or 0,
            "output_tokens": request.num_output_tokens,
            "preemptions": row.num_preemptions,
            "finish_reason": str(finish_reason),
        }
        self._tracer.span("request", row.began, args, row=row.number, ended=now)
        self._tracer.close_row(row.number)
