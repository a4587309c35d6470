"""Random draws from logits, each row by itself in every bit.

A random number is a pure function of (seed, position), by Philox4x32-10 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"): nothing has to be stored, replayed or carried along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pagoda.messages.sampling_params import SamplingParams

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """Token ids by inversion of the distribution function, in the order of the vocabulary.

    Args:
        logits: [rows, vocab] float32, finite or -inf, at least one finite in each row.
        params: Temperature, min-p, top-k and top-p of each row.
        uniforms: A random number in [0, 1) for each row.
    """
    # With the highest at zero, no quotient can overflow, however low the temperature.
    logits = logits - logits.amax(dim=1, keepdim=True)
    logits /= torch.tensor([[p.temperature] for p in params], dtype=torch.float32)
    for row, one in enumerate(params):
        _truncate(logits[row], one)
    cumulative = torch.softmax(logits, dim=1).double().cumsum(dim=1)
    total = cumulative[:, -1:]
    target = torch.tensor(uniforms, dtype=torch.float64)[:, None] * total
    # Below the total even when the product is rounded up, so that there is always a token above it.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    found: list[int] = torch.searchsorted(cumulative, target, right=True).flatten().tolist()
    return found


def _truncate(logits: Tensor, params: SamplingParams) -> None:
    """Takes unlikely tokens out of logits [vocab], in place: min-p, then top-k, then top-p, as in vLLM."""
    if params.min_p > 0:
        logits.masked_fill_(logits < logits.max() + math.log(params.min_p), -torch.inf)
    if 0 < params.top_k < logits.shape[0]:
        smallest = torch.topk(logits, params.top_k).values[-1]
        logits.masked_fill_(logits < smallest, -torch.inf)
    if params.top_p < 1:
        _keep_nucleus(logits, params.top_p)


def _keep_nucleus(logits: Tensor, top_p: float) -> None:
    """Keeps the most likely tokens until they add up to `top_p`; of equal ones the lower id comes first."""
    probabilities = torch.softmax(logits, dim=0)
    # Tokens below this add up to less than 1 - top_p, so none of them is needed; the others are few to sort.
    enough = min((1 - top_p) / logits.shape[0], float(probabilities.max()))
    candidates = (probabilities >= enough).nonzero().flatten()
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    before = ordered.double().cumsum(dim=0) - ordered
    kept = candidates[order[before < top_p]]
    values = logits[kept]
    logits.fill_(-torch.inf)
    logits[kept] = values


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1), of 53 bits, for output token `position`; seeds count modulo 2^64."""
    counter = (position & _MASK, (position >> 32) & _MASK, 0, 0)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    low, high, *_ = philox4x32(counter, key)
    return float(((high << 32) | low) >> 11) * 2.0**-53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Four random 32-bit words from four words of counter and two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
