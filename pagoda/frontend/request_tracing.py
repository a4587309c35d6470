"""A row of the trace for each answer, from the first byte of its request to its last byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagoda.frontend.request_tracker import RequestStatistics, RequestTracker
from pagoda.telemetry.tracer import Tracer


@dataclass(slots=True)
class _Row:
    number: int
    first_token_ns: int | None = None
    """Time at which the first token had been written to the client."""
    detokenize_ns: int = 0
    write_ns: int = 0


class AnswerRows:
    """Writes a row for each answer of a tracker while tracing is on, also for answers that run already."""

    def __init__(self, tracer: Tracer, tracker: RequestTracker) -> None:
        self._tracer = tracer
        self._tracker = tracker
        self._rows: dict[str, _Row] = {}
        for record in tracker.running.values():
            self._start(record)
            if record.first_token_ns is not None:
                self._end_first_token(record, self._rows[record.request_id], record.first_token_ns)
        self._unsubscribe = tracker.subscribe(
            on_start=self._start, on_finish=self._finish, on_delivery=self._deliver
        )

    def close(self) -> None:
        self._unsubscribe()
        for record in self._tracker.running.values():
            self._close_row(record, self._tracker.clock_ns())

    def _start(self, record: RequestStatistics) -> None:
        row = self._tracer.open_row(f"request {record.request_id}")
        self._rows[record.request_id] = _Row(row)
        arrived = record.client_request.arrived_ns
        self._tracer.span("prepare", arrived, row=row, ended=record.started_ns)

    def _finish(self, record: RequestStatistics) -> None:
        self._close_row(record, record.ended_ns or self._tracker.clock_ns())

    def _deliver(
        self, record: RequestStatistics, received_ns: int, decoded_ns: int, written_ns: int
    ) -> None:
        row = self._rows.get(record.request_id)
        if row is None:
            return
        row.detokenize_ns += decoded_ns - received_ns
        row.write_ns += written_ns - decoded_ns
        if row.first_token_ns is None and record.first_token_ns is not None:
            self._end_first_token(record, row, written_ns)
        elif self._tracer.verbose():
            self._tracer.span("token", received_ns, row=row.number, ended=written_ns)

    def _end_first_token(self, record: RequestStatistics, row: _Row, ended: int) -> None:
        row.first_token_ns = ended
        self._tracer.span("first token", record.started_ns, row=row.number, ended=ended)

    def _close_row(self, record: RequestStatistics, ended: int) -> None:
        row = self._rows.pop(record.request_id, None)
        if row is None:
            return
        if row.first_token_ns is None and record.first_token_ns is not None:
            self._end_first_token(record, row, ended)
        if row.first_token_ns is None:
            self._tracer.span("waiting", record.started_ns, row=row.number, ended=ended)
        else:
            self._tracer.span("stream", row.first_token_ns, row=row.number, ended=ended)
        args: dict[str, Any] = {
            "request": record.request_id,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "finish_reason": record.finish_reason,
            "detokenize_ms": row.detokenize_ns / 1e6,
            "write_ms": row.write_ns / 1e6,
        }
        if record.queue_time_s is not None:
            args["queue_ms"] = record.queue_time_s * 1e3
        arrived = record.client_request.arrived_ns
        self._tracer.span("request", arrived, args, row=row.number, ended=ended)
        self._tracer.close_row(row.number)
