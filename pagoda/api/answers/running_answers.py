# SPDX-License-Identifier: Apache-2.0
"""Running answers, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from pagoda.telemetry.request_tracker import RequestStatistics

MAX_ANSWERS = 200
"""Answers listed one by one: the oldest."""


def running_answers(running: Mapping[str, RequestStatistics], now_ns: int) -> list[dict[str, Any]]:
    """The oldest of running answers, at most `MAX_ANSWERS`. `now_ns` is the time on the clock of their tracker."""
    return [
        {
            "id": record.request_id,
            "name": record.client_request.id,
            "key": record.client_request.key_name,
            "state": "waiting" if record.first_token_ns is None else "generating",
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "max_tokens": record.max_tokens,
            "age_s": round((now_ns - record.client_request.arrived_ns) / 1e9, 2),
        }
        for record in islice(running.values(), MAX_ANSWERS)
    ]
