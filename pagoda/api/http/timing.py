# SPDX-License-Identifier: Apache-2.0
"""The times of an answer, for APIs that tell them to the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagoda.api.answers.generation import Generation


@dataclass(frozen=True)
class AnswerTimes:
    """Nanoseconds of the parts of an answer so far."""

    prompt_ns: int = 0
    """Time from the first step to the first token, or to now."""
    decode_ns: int = 0
    """Time from the first token to the last one."""
    total_ns: int = 0
    """Time since the request arrived."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def times_of(generation: Generation, index: int) -> AnswerTimes:
    """The times of answer `index` of a generation, which runs."""
    tracker = generation.generator.tracker
    request = generation.requests[index]
    num_prompt_tokens = len(request.prompt_token_ids)
    record = tracker.running.get(request.request.request_id)
    now = tracker.clock_ns()
    if record is None:
        return AnswerTimes(
            total_ns=now - request.client_request.arrived_ns, num_prompt_tokens=num_prompt_tokens
        )
    began = record.admitted_ns or record.started_ns
    first = record.first_token_ns
    return AnswerTimes(
        prompt_ns=max((first or now) - began, 0),
        decode_ns=0
        if first is None or record.last_token_ns is None
        else record.last_token_ns - first,
        total_ns=now - record.client_request.arrived_ns,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_output_tokens=record.num_output_tokens,
        num_draft_tokens=record.speculation.num_draft_tokens,
        num_accepted_tokens=record.speculation.num_accepted_tokens,
    )


def timings(times: AnswerTimes) -> dict[str, float]:
    """Times of an answer so far by llama.cpp's names, in ms, and its drafts, if there were any. The first token
    belongs to the prompt's time."""
    num_prompt = times.num_prompt_tokens - times.num_cached_tokens
    num_steps = max(times.num_output_tokens - 1, 0)
    prompt_ms, predicted_ms = times.prompt_ns / 1e6, times.decode_ns / 1e6
    drafts = {}
    if times.num_draft_tokens:
        drafts["draft_n"] = times.num_draft_tokens
        drafts["draft_n_accepted"] = times.num_accepted_tokens
    return {
        "cache_n": times.num_cached_tokens,
        "prompt_n": num_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / num_prompt if num_prompt else 0.0,
        "prompt_per_second": 1e3 * num_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": times.num_output_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / num_steps if num_steps else 0.0,
        "predicted_per_second": 1e3 * num_steps / predicted_ms if predicted_ms else 0.0,
        **drafts,
    }


def progress_of(times: AnswerTimes) -> list[dict[str, Any]]:
    """Fields of llama.cpp's two events about the prompt: its beginning, and its end at the first token."""
    total, cached = times.num_prompt_tokens, times.num_cached_tokens
    return [
        {
            "prompt_progress": {
                "total": total,
                "cache": cached,
                "processed": processed,
                "time_ms": spent_ns // 10**6,
            },
            "timings": timings(
                AnswerTimes(
                    prompt_ns=spent_ns, num_prompt_tokens=processed, num_cached_tokens=cached
                )
            ),
        }
        for processed, spent_ns in ((cached, 0), (total, times.prompt_ns))
    ]
