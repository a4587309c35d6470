"""The times of an answer, for APIs that tell them to the client."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.api.generation import Generation


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


def times_of(generation: Generation, index: int) -> AnswerTimes:
    """The times of answer `index` of a generation, which runs."""
    tracker = generation.generator.tracker
    request = generation.requests[index]
    num_prompt_tokens = len(request.request.prompt_token_ids)
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
    )
