# SPDX-License-Identifier: Apache-2.0
"""Checks of what a worker sends, which may be wrong in every number, against the requests that it computes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import chain
from operator import attrgetter

from pagoda.engine.request import Request, RequestState
from pagoda.messages.sampling_params import ALL_LOGPROBS
from pagoda.messages.worker import StepResult, WorkerReady


def result_fits(
    result: StepResult,
    requests: Mapping[int, Request],
    vocab_size: int,
    drafted: Container[int] = (),
) -> bool:
    """True if the result can be of these requests, by slot, some of which have `drafted`. Costs a glance at each
    token."""
    slots, token_ids = result.slots, result.token_ids
    if len(slots) != len(token_ids) or len(set(slots)) != len(slots):
        return False
    if not requests.keys() >= set(slots) or not all(token_ids):
        return False
    if max(chain.from_iterable(token_ids), default=0) >= vocab_size:
        return False
    return all(
        request.state is RequestState.FINISHED
        or (
            # A mask is for one token.
            (request.constraint is None or len(sampled) == 1 or slot in drafted)
            and _extras_fit(result, slot, request, sampled, vocab_size)
        )
        for slot, sampled in zip(slots, token_ids, strict=True)
        if (request := requests[slot]).constraint is not None
        or request.work.sampling.logprobs is not None
    ) and all(
        slot in requests and _prompt_fits(result, slot, requests[slot], vocab_size)
        for slot in {**result.prompt_logprobs, **result.embeddings}
    )


def is_alike(worker: WorkerReady, before: WorkerReady) -> bool:
    """True if a worker can take the place of the one before it, by whose sizes requests were admitted."""
    sizes = attrgetter("num_blocks", "block_size", "max_model_len", "vocab_size", "kv_groups")
    return bool(sizes(worker) == sizes(before))


def _extras_fit(
    result: StepResult, slot: int, request: Request, sampled: list[int], vocab_size: int
) -> bool:
    """True if what belongs to sampled tokens is there, and of as many tokens."""
    num_top = request.work.sampling.logprobs
    if num_top is None:
        return True
    logprobs = result.logprobs.get(slot, ())
    most = vocab_size if num_top == ALL_LOGPROBS else num_top
    return len(logprobs) == len(sampled) and all(one.fits(vocab_size, most) for one in logprobs)


def _prompt_fits(result: StepResult, slot: int, request: Request, vocab_size: int) -> bool:
    """True if what belongs to the prompt was asked for, and goes on where what is known ends."""
    vector, scores = result.embeddings.get(slot), result.prompt_logprobs.get(slot)
    if vector is not None and (request.work.pooling is None or not vector or len(vector) % 4):
        return False
    if scores is None or request.state is RequestState.FINISHED:
        return True
    num_top = request.work.sampling.prompt_logprobs
    if num_top is None or scores.first > request.num_scored_tokens:
        return False
    most = vocab_size if num_top == ALL_LOGPROBS else num_top
    return scores.fits(vocab_size, most, request.num_prompt_tokens)
