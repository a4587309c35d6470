# SPDX-License-Identifier: Apache-2.0
"""One line in the log for each answer: figures, but no text of the prompt or the answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from pagoda.telemetry.request_tracker import RequestStatistics

_log = logging.getLogger(__name__)


def log_answer(record: RequestStatistics) -> None:
    if _log.isEnabledFor(logging.INFO):
        fields = _fields(record)
        extra = {"request_id": record.request_id, "fields": fields}
        _log.info("%s: %s", record.finish_reason, ", ".join(_words(fields)), extra=extra)


def _fields(record: RequestStatistics) -> dict[str, Any]:
    """The fields of the line. Times are milliseconds, or None where the answer had no such time."""
    times = {
        "queue_ms": record.queue_time_s,
        "ttft_ms": record.ttft_s,
        "itl_ms": record.itl_s,
        "duration_ms": record.duration_s,
    }
    return {
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        **{name: None if s is None else round(s * 1e3, 2) for name, s in times.items()},
        "key": record.client_request.key_name or None,
        "error": record.error or None,
    }


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
