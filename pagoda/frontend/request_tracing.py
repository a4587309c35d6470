"""A row of the trace for each answer, from the first byte of its request to its last byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagoda.frontend.request_tracker import Delivery, Growth, RequestStatistics, RequestTracker
from pagoda.telemetry.tracer import Tracer


@dataclass(slots=True)
class _Row:
    number: int
    first_token_ns: int | None = None
    """When the first token had been handed on."""
    detokenize_ns: int = 0
    write_ns: int = 0


class AnswerRows:
    """Observes a book while tracing is on. Of answers that run already, the book knows what they did before."""

    def __init__(self, tracer: Tracer, book: RequestTracker) -> None:
        self._tracer = tracer
        self._book = book
        self._rows: dict[str, _Row] = {}
        for record in book.live.values():
            self.began(record)
            if record.first_token_ns is not None:
                self._end_first_token(record, self._rows[record.request_id], record.first_token_ns)
        self._unobserve = book.observe(self)
        book.deliveries = self

    def close(self) -> None:
        """Tracing ends."""
        self._unobserve()
        self._book.deliveries = None
        for record in self._book.live.values():
            self._close_row(record, self._book.clock_ns())

    # ---- RequestObserver

    def began(self, record: RequestStatistics) -> None:
        row = self._tracer.open_row(f"request {record.request_id}")
        self._rows[record.request_id] = _Row(row)
        arrived = record.origin.arrived_ns
        self._tracer.span("prepare", arrived, row=row, ended=record.started_ns)

    def grew(self, record: RequestStatistics, growth: Growth) -> None:
        """What is handed on is told by `delivered`."""

    def ended(self, record: RequestStatistics) -> None:
        self._close_row(record, record.ended_ns or self._book.clock_ns())

    # ---- DeliveryObserver

    def delivered(self, record: RequestStatistics, delivery: Delivery) -> None:
        row = self._rows.get(record.request_id)
        if row is None:
            return
        row.detokenize_ns += delivery.made_ns - delivery.taken_ns
        row.write_ns += delivery.handed_on_ns - delivery.made_ns
        if row.first_token_ns is None and record.first_token_ns is not None:
            self._end_first_token(record, row, delivery.handed_on_ns)
        elif self._tracer.verbose():
            taken, handed_on = delivery.taken_ns, delivery.handed_on_ns
            self._tracer.span("token", taken, row=row.number, ended=handed_on)

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
        arrived = record.origin.arrived_ns
        self._tracer.span("request", arrived, args, row=row.number, ended=ended)
        self._tracer.close_row(row.number)
