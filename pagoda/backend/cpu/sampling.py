"""Rows to sample as the native sampler takes them, and what it reports of each."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from pagoda.backend.cpu.weights import address
from pagoda.backend.sampling import Outcome, SampledRow, SamplingRow
from pagoda.messages.frontend import TokenLogprobs

if TYPE_CHECKING:
    from pagoda.backend import _native

_SEEDS = 2**64
_DRAWN = int(Outcome.DRAWN)


def add_row(batch: _native.SamplingBatch, row: SamplingRow, vocab_size: int) -> None:
    """Adds a row, whose arrays must live on until the batch has been sampled.
    Raises ValueError: the mask of allowed tokens is not of this vocabulary."""
    rules, sampling = row.rules, row.rules.sampling
    words, allowed = -(-vocab_size // 32), row.allowed
    if allowed is not None and (
        allowed.dtype != torch.int32 or allowed.shape != (words,) or not allowed.is_contiguous()
    ):
        raise ValueError(f"A mask of allowed tokens must be {words} words of int32.")
    greedy = sampling.greedy
    batch.add(
        greedy,
        0.0 if greedy else rules.scale,
        rules.lowest_power,
        max(sampling.top_k, 0),
        rules.top_p,
        rules.typical_p,
        (sampling.seed or 0) % _SEEDS,
        row.position,
        -1 if sampling.logprobs is None else sampling.logprobs,
        address(allowed),
        _start(rules.stops),
        len(rules.stops) if row.holds_back_stops else 0,
        _start(rules.bias_ids),
        _start(rules.biases),
        len(rules.bias_ids),
        _start(row.seen),
        _start(row.counts),
        len(row.seen),
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )


def _start(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]


def sampled_row(
    row: SamplingRow, numbers: list[int], logprobs: list[float], vocab_size: int
) -> SampledRow:
    """Reads what the kernel reports of a row: outcome, token, rank and likeliest tokens; log-probabilities."""
    outcome, token_id, rank = numbers[:3]
    if outcome != _DRAWN:
        return SampledRow(Outcome(outcome))
    num_top = row.rules.sampling.logprobs
    if num_top is None:
        return SampledRow(Outcome.DRAWN, token_id)
    end = min(num_top, vocab_size)
    reported = TokenLogprobs(logprobs[0], rank, numbers[3 : 3 + end], logprobs[1 : 1 + end])
    return SampledRow(Outcome.DRAWN, token_id, reported)
