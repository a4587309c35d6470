# SPDX-License-Identifier: Apache-2.0
"""Sampling in plain PyTorch, row by row: the specification of `Backend.sample`; see `pagoda.backend.sampling`.

**Truncation.** In this order: `min_p` leaves out tokens by their power, and none below 2^`LOWEST_POWER` is ever
drawn; `top_k` keeps all tokens that equal the k-th; `top_p` goes through what is left from the highest logit
down, of equal ones from the lowest id up, until weights add up to its share; `typical_p` goes through what is
left from the power nearest to the mean power (Meister et al. 2022; distances in float32), of equally near ones
from the lowest id up. At least one token is kept.

All that is rounded is rounded by single operations on float32 or float64, which every backend can repeat; sums
are of whole numbers. Random numbers are a pure function of (seed, position), by Philox4x32-10 (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"): nothing has to be stored, replayed or carried along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pagoda.backend.host import check_token_ids
from pagoda.backend.sampling import (
    LOWEST_POWER,
    WEIGHT_BITS,
    SampledRow,
    SampledRows,
    SampleOutcome,
    SamplingRow,
    ScoredRows,
    check_logits,
    share_of,
)
from pagoda.backend.sampling_table import SamplingTable
from pagoda.messages.frontend import TokenLogprobs

_POLYNOMIAL = (1.32647273e-3, 9.67151299e-3, 5.55073358e-2, 2.40222424e-1, 6.93147004e-1, 1.0)
"""The power of two between -1/2 and 1/2, with the least relative error of its degree; highest power first."""
_BELOW_ALL = -60.0
"""Power that weights are computed for in place of lower ones, which all round to 0."""
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def score_rows(logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
    check_logits(logits, token_ids)
    check_token_ids(token_ids, logits.shape[1])
    num_top = min(num_top, logits.shape[1])
    finite = bool(logits.isfinite().all())
    entries = [
        token_logprobs(own, token_id, num_top)
        for own, token_id in zip(logits, token_ids.tolist(), strict=True)
        if finite
    ]
    shape = (len(entries), num_top)
    return ScoredRows(
        finite,
        torch.tensor([entry.rank for entry in entries], dtype=torch.int64),
        torch.tensor([entry.top_token_ids for entry in entries]).long().reshape(shape),
        torch.tensor([[entry.logprob, *entry.top_logprobs] for entry in entries]),
    )


def sample_rows(logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
    """The next token of each slot from logits [slots, vocab] float32, which stay as they are."""
    table.check(logits, slots)
    rows = [sample_row(own, table.row(slot)) for own, slot in zip(logits, slots, strict=True)]
    return as_arrays(rows, table.most_reported(slots))


def as_arrays(rows: Sequence[SampledRow], num_top: int) -> SampledRows:
    """Results of the rows of a step together; none reports more than `num_top` likeliest tokens."""
    found = SampledRows(
        outcomes=torch.tensor([row.outcome for row in rows], dtype=torch.int64),
        token_ids=torch.tensor([row.token_id for row in rows], dtype=torch.int64),
        ranks=torch.zeros(len(rows), dtype=torch.int64),
        top_token_ids=torch.zeros(len(rows), num_top, dtype=torch.int64),
        logprobs=torch.zeros(len(rows), 1 + num_top),
    )
    for i, row in enumerate(rows):
        if row.logprobs is not None:
            count = len(row.logprobs.top_token_ids)
            found.ranks[i] = row.logprobs.rank
            found.top_token_ids[i, :count] = torch.tensor(row.logprobs.top_token_ids)
            found.logprobs[i, 0] = row.logprobs.logprob
            found.logprobs[i, 1 : 1 + count] = torch.tensor(row.logprobs.top_logprobs)
    return found


def sample_row(logits: Tensor, row: SamplingRow) -> SampledRow:
    """The next token from logits [vocab] float32, which stay as they are."""
    if not bool(logits.isfinite().all()):
        return SampledRow(SampleOutcome.NOT_FINITE)
    changed = apply_rules(logits, row)
    highest = float(changed.max())
    if highest == -math.inf and row.forbids_tokens:
        return SampledRow(SampleOutcome.NOTHING_ALLOWED)
    if not math.isfinite(highest):
        return SampledRow(SampleOutcome.OVERFLOWN)
    if row.rules.sampling.greedy:
        token_id = int((changed == highest).nonzero()[0])
    else:
        token_id = _draw(changed, row)
    num_top = row.rules.sampling.logprobs
    reported = None if num_top is None else token_logprobs(logits, token_id, num_top)
    return SampledRow(SampleOutcome.DRAWN, token_id, reported)


def sample_candidates(values: Tensor, token_ids: Tensor, row: SamplingRow) -> SampledRow | None:
    """The next token from the highest logits of a row, as `sample_row` gives it from all.

    `values` [n] float32 are highest first and `token_ids` [n] are theirs, n as `SamplingTable.num_candidates`
    says. None if other tokens may be drawn as well: `top_k` keeps all that equal the k-th. What is not finite
    among lower logits is not found.
    """
    if not bool(values.isfinite().all()):
        return SampledRow(SampleOutcome.NOT_FINITE)
    sampling = row.rules.sampling
    if sampling.greedy:
        return SampledRow(SampleOutcome.DRAWN, int(token_ids[0]))
    if float(values[sampling.top_k]) == float(values[sampling.top_k - 1]):
        return None
    order = token_ids.argsort()
    return SampledRow(SampleOutcome.DRAWN, int(token_ids[order[_draw(values[order], row)]]))


def apply_rules(logits: Tensor, row: SamplingRow) -> Tensor:
    """Logits [vocab] as the rules of a request leave them, in the order in which vLLM applies these."""
    rules, sampling, logits = row.rules, row.rules.sampling, logits.clone()
    if row.allowed is not None:
        bits = row.allowed[:, None] >> torch.arange(32, dtype=torch.int32) & 1
        logits.masked_fill_(bits.flatten()[: len(logits)] == 0, -torch.inf)
    if row.holds_back_stops:
        logits[torch.tensor(rules.stops)] = -torch.inf
    if rules.bias_ids:
        logits[torch.tensor(rules.bias_ids)] += torch.tensor(rules.biases)
    if row.seen:
        seen, counts = torch.tensor(row.seen), torch.tensor(row.counts)
        values = logits[seen]
        if sampling.repetition_penalty != 1:
            penalty = torch.tensor(sampling.repetition_penalty)
            values = torch.where(values > 0, values / penalty, values * penalty)
        values -= counts * torch.tensor(sampling.frequency_penalty)
        values -= (counts > 0) * torch.tensor(sampling.presence_penalty)
        logits[seen] = values
    return logits


def powers_of(logits: Tensor, scale: float) -> Tensor:
    """Likelihoods of tokens against the likeliest one, as powers of two: [vocab] float32."""
    return (logits - logits.max()) * torch.tensor(scale)


def weights_of(powers: Tensor) -> Tensor:
    """2 to the powers, in units of 2^-`WEIGHT_BITS` but not rounded to whole ones yet: [vocab] float32."""
    bounded = powers.clamp(min=_BELOW_ALL)
    whole = bounded.round()
    rest = bounded - whole
    total = torch.full_like(rest, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        total = total * rest
        total = total + coefficient
    return total * ((whole.int() + (127 + WEIGHT_BITS)) << 23).view(torch.float32)


def kept_weights(logits: Tensor, row: SamplingRow) -> Tensor:
    """Weights [vocab] int64 of the tokens that may be drawn, 0 of the others."""
    rules, sampling = row.rules, row.rules.sampling
    powers = powers_of(logits, rules.scale)
    exact = weights_of(powers)
    weights = exact.round().long()
    weights[powers < torch.tensor(rules.lowest_power)] = 0
    if 0 < sampling.top_k < int((weights > 0).sum()):
        weights[logits < logits.topk(sampling.top_k).values[-1]] = 0
    if sampling.top_p < 1:
        order = logits.sort(descending=True, stable=True).indices
        weights = _first(weights, order, sampling.top_p)
    if sampling.typical_p < 1:
        products = (exact * powers.clamp(min=_BELOW_ALL)).round().long()
        products[weights == 0] = 0
        mean = torch.tensor(float(int(products.sum())) / float(int(weights.sum())))
        distances = (powers - mean).abs()
        weights = _first(weights, distances.sort(stable=True).indices, sampling.typical_p)
    return weights


def _first(weights: Tensor, order: Tensor, probability: float) -> Tensor:
    """The weights of the first tokens in an order, until they have this share of the total."""
    ordered = weights[order]
    before = ordered.cumsum(0) - ordered
    goal = max(1, -(-(int(weights.sum()) * share_of(probability)) >> 53))
    kept = torch.zeros_like(weights)
    chosen = order[before < goal]
    kept[chosen] = weights[chosen]
    return kept


def _draw(logits: Tensor, row: SamplingRow) -> int:
    cumulative = kept_weights(logits, row).cumsum(0)
    random = uniform_bits(row.rules.sampling.seed or 0, row.position)
    target = int(cumulative[-1]) * random >> 53
    return int(torch.searchsorted(cumulative, target, right=True))


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Report on a token and the `num_top` likeliest ones, of equal ones those of lower ids."""
    powers = powers_of(logits, math.log2(math.e))
    weights = weights_of(powers).round().long()
    total = int(weights[powers >= LOWEST_POWER].sum())
    log_total = math.log(math.ldexp(float(total), -WEIGHT_BITS))
    logprobs = ((logits.double() - float(logits.max())) - log_total).float()
    top = logits.sort(descending=True, stable=True).indices[:num_top]
    rank = int((logits > logits[token_id]).sum()) + 1
    return TokenLogprobs(float(logprobs[token_id]), rank, top.tolist(), logprobs[top].tolist())


def uniform_bits(seed: int, position: int) -> int:
    """The random number below 2^53 for output token `position`; seeds count modulo 2^64."""
    counter = (position & _MASK, (position >> 32) & _MASK, 0, 0)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    low, high, *_ = philox4x32(counter, key)
    return ((high << 32) | low) >> 11


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Four random 32-bit words from four words of counter and two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
