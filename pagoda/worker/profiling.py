# SPDX-License-Identifier: Apache-2.0
"""Memory of the largest steps, asked of the backend once weights are loaded and before KV takes the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from pagoda.backend.base import TokenBatch
from pagoda.model.decoder import Decoder

_FEW_TOKENS = 64
"""Tokens of a step so short that its attention to a long context is shared out among threads."""


def profile_steps(
    model: Decoder[Any, Any],
    *,
    num_tokens: int,
    max_model_len: int,
    block_sizes: Sequence[int],
    whole_prompts: bool,
    adapter: int | None = None,
) -> int:
    """Bytes that a step of so many tokens takes at most, by the blocks' sizes of all KV groups.

    All tokens have the `adapter` of that number, if there is one. The model's caches need one block; its contents
    are undefined afterwards.
    """
    found = []
    for count in sorted({num_tokens, min(num_tokens, _FEW_TOKENS)}):
        step = _step(count, max_model_len, block_sizes, whole_prompts=whole_prompts)
        if adapter is not None:
            step = replace(step, adapters=torch.full((count,), adapter))
        found.append(model.profile(step))
    return max(found)


def _step(
    num_tokens: int, max_model_len: int, block_sizes: Sequence[int], *, whole_prompts: bool
) -> TokenBatch:
    """Sequences whose last tokens are computed behind all that they may have; whole ones have no other tokens."""
    counts = list(_shares(num_tokens, max_model_len))
    ends = counts if whole_prompts else [max_model_len] * len(counts)
    lens = torch.tensor(counts)
    return TokenBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.cat(
            [torch.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
        ),
        sequence_ids=torch.arange(len(counts)).repeat_interleave(lens),
        query_lens=lens,
        context_lens=torch.tensor(ends),
        block_tables=tuple(
            torch.zeros((len(counts), -(-max_model_len // size)), dtype=torch.int64)
            for size in block_sizes
        ),
    )


def _shares(num_tokens: int, most: int) -> Iterator[int]:
    for done in range(0, num_tokens, most):
        yield min(most, num_tokens - done)
