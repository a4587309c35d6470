# SPDX-License-Identifier: Apache-2.0
"""Requests that are answered with and without a drafter in the worker, and steps that ask it for drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from driver import GREEDY, Driver
from hypothesis import strategies as st

from pagoda.messages.frontend import GenerateRequest, TokenChunk, Work
from pagoda.messages.sampling_params import SamplingParams

PROMPT = [7, 7, 9, 300, 7, 9, 11, 7]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy too": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "reported": {"temperature": 1.0, "logprobs": 3},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 1},
}
STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=4, max_size=14
)
"""Drafts of a step, of them right ones, and drafts that are asked for."""


def requests(length: int = 40) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=name,
            prompt_token_ids=PROMPT * 3 + [place],
            work=Work(SamplingParams(**{"seed": 3, "max_tokens": length} | SAMPLING[name])),
        )
        for place, name in enumerate(SAMPLING)
    ]


def said(chunks: Iterable[TokenChunk]) -> dict[str, list[object]]:
    """Tokens of each request, with their log-probabilities."""
    found: dict[str, list[object]] = {name: [] for name in SAMPLING}
    for chunk in chunks:
        for at, token in enumerate(chunk.token_ids):
            report = chunk.logprobs[at] if chunk.logprobs else None
            found[chunk.request_id].append((token, report))
    return found


def check_proposals(
    driver: Driver,
    steps: list[tuple[int, int, int]],
    chunk: int,
    data: st.DataObject,
    answer: Callable[[list[int], int], list[int]],
    drafts: Callable[[list[int], int], list[int]],
) -> None:
    """Slots draft now and then, verify drafts of any quality, and leave; what is proposed is what `drafts` says
    behind known tokens. `answer` is what the model says there."""
    driver.start(0, PROMPT, GREEDY)
    driver.start(1, PROMPT[::-1] * 3, SamplingParams(temperature=1.0, seed=4, max_tokens=1000))
    try:
        for length, num_right, most in steps:
            shares = {slot: driver.share(slot, chunk) for slot in driver.tokens}
            drafted, behind = {}, driver.share(0, 10_000)
            if behind == 1 and length:
                right = answer(driver.tokens[0], length)
                draft = right[:num_right] + [(it + 1) % 320 for it in right[num_right:]]
                drafted, shares[0] = {0: draft}, 1 + len(draft)
            wanted = {0: most} if most and shares[0] >= behind else {}
            result = driver.step(shares, drafted, wanted)
            for slot, draft in result.proposals.items():
                assert draft == drafts(driver.tokens[slot], len(draft))
            if data.draw(st.integers(0, 9)) == 0 and 1 in driver.tokens:
                driver.free(1)
    finally:
        for slot in list(driver.tokens):
            driver.free(slot)
        driver.step({})
