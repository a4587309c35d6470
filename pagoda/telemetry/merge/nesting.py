"""Spans of a row, one within another."""

from __future__ import annotations

from pagoda.telemetry.merge.model import Span

_ROUNDING_NS = 1_000
"""Times are rounded on their way through a fragment, the more the longer a host has been up: of spans that
touched, one may begin so long before the other ends."""


def nest(spans: list[Span]) -> int:
    """Sorts the spans, outer ones first, and makes what touches touch again.

    A span that really goes beyond the one around it is cut; returns how many were.
    """
    spans.sort(key=lambda span: (span.start, -span.end))
    around: list[Span] = []
    num_cut = 0
    earliest = spans[0].start if spans else 0
    for span in spans:
        span.start = max(span.start, earliest)  # what is around it may have been moved
        span.end = max(span.end, span.start)
        _leave_ended(around, span)
        if around and span.end > around[-1].end:
            span.end = around[-1].end
            num_cut += 1
        around.append(span)
        earliest = span.start
    return num_cut


def _leave_ended(around: list[Span], span: Span) -> None:
    """Afterwards the last of `around` holds the beginning of the span."""
    while around:
        outer = around[-1]
        if span.end > outer.end and outer.end - span.start <= _ROUNDING_NS:
            span.start = max(span.start, outer.end)
        if outer.end > span.start:
            return
        around.pop()
