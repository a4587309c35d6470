"""One line in the log for each answer: figures, but no text of the prompt or the answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from pagoda.frontend.request_tracker import RequestStatistics

_log = logging.getLogger(__name__)


def log_answer(record: RequestStatistics) -> None:
    """Logs an answer that has finished."""
    if _log.isEnabledFor(logging.INFO):
        fields = _fields(record)
        extra = {"request_id": record.request_id, "fields": fields}
        _log.info("%s: %s", record.finish_reason, ", ".join(_words(fields)), extra=extra)


def _fields(record: RequestStatistics) -> dict[str, Any]:
    """The fields of the line. Times are milliseconds, or None where the answer had no such time."""
    arrived = record.client_request.arrived_ns
    first, last = record.first_token_ns, record.last_token_ns
    num_gaps = record.num_output_tokens - 1
    itl_ms = None
    if first is not None and last is not None and num_gaps > 0:
        itl_ms = _ms((last - first) / num_gaps)
    return {
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "queue_ms": None if record.queue_time_s is None else _ms(record.queue_time_s * 1e9),
        "ttft_ms": None if first is None else _ms(first - arrived),
        "itl_ms": itl_ms,
        "duration_ms": None if record.ended_ns is None else _ms(record.ended_ns - arrived),
        "key": record.client_request.key_name or None,
        "error": record.error or None,
    }


def _ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 2)


def _words(fields: dict[str, Any]) -> Iterator[str]:
    yield f"{fields['prompt_tokens']} prompt tokens ({fields['cached_tokens']} cached)"
    yield f"{fields['output_tokens']} output tokens"
    for name, word in (
        ("queue_ms", "queued"),
        ("ttft_ms", "first token after"),
        ("itl_ms", "then one every"),
        ("duration_ms", "all in"),
    ):
        if fields[name] is not None:
            yield f"{word} {fields[name]:.9g} ms"
    for name in ("key", "error"):
        if fields[name] is not None:
            yield f"{name} {fields[name]}"
