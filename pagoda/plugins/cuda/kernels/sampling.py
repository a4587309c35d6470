# SPDX-License-Identifier: Apache-2.0
"""Sampling on the device: the reference's tokens in every bit, by search for thresholds instead of sorting.

Weights of tokens are whole numbers, whose sums are exact in any order. What a token must have to be kept is found
by counting, or adding up, those at or above a number, two bits of the number at a time; of equal tokens those of
the lowest ids are kept. See `pagoda.backend.sampling` and `pagoda.backend.reference.sampling`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from pagoda.backend.sampling import CERTAIN
from pagoda.backend.sampling_table import COLUMNS, LISTS
from pagoda.plugins.cuda.kernels.numbers import is_finite, rounded

PACKED = tuple(name for name in COLUMNS if name not in {*LISTS, "num_biases", "num_seen"})
"""Columns of packed rows, which are those of the table without lists; numbers of float32 are their bits, and
`num_stops` stands for what forbids tokens."""
OUTCOME, TOKEN, RANK, TOTAL, HIGHEST, VALUE, FIXED = range(7)
"""Columns of results; behind them are the ids, then the bits of the logits, of the likeliest tokens."""
_ROUND = 8388608.0
_ROUND_TO_WHOLE = tl.constexpr(_ROUND)
_COLUMNS = tl.constexpr(len(PACKED))
_GREEDY = tl.constexpr(PACKED.index("greedy"))
_SCALE = tl.constexpr(PACKED.index("scale"))
_LOWEST = tl.constexpr(PACKED.index("lowest_power"))
_TOP_K = tl.constexpr(PACKED.index("top_k"))
_TOP_P = tl.constexpr(PACKED.index("top_p"))
_TYPICAL_P = tl.constexpr(PACKED.index("typical_p"))
_SEED = tl.constexpr(PACKED.index("seed"))
_POSITION = tl.constexpr(PACKED.index("position"))
_MASKED = tl.constexpr(PACKED.index("masked"))
_FORBIDS = tl.constexpr(PACKED.index("num_stops"))
_REPETITION = tl.constexpr(PACKED.index("repetition"))
_FREQUENCY = tl.constexpr(PACKED.index("frequency"))
_PRESENCE = tl.constexpr(PACKED.index("presence"))
_CERTAIN = tl.constexpr(CERTAIN)
_FIXED = tl.constexpr(FIXED)


@triton.jit
def _float(packed_ptr, column: tl.constexpr, there=True):
    return tl.load(packed_ptr + column, there, 0).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _ordered(x):
    """Whole numbers from 0 to 2^32 in the order of float32 numbers; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _weighed(x, highest, scale):
    """Powers of two of logits, and 2 to them in units of 2^-40, not rounded to whole ones yet."""
    power = (x - highest) * scale
    bounded = tl.maximum(power, -60.0)
    whole = rounded(bounded)
    rest = bounded - whole
    total = 1.32647273e-3 * rest + 9.67151299e-3
    total = total * rest + 5.55073358e-2
    total = total * rest + 2.40222424e-1
    total = total * rest + 6.93147004e-1
    total = total * rest + 1.0
    bits = (whole.to(tl.int32) + 167) << 23
    return power, total * bits.to(tl.float32, bitcast=True)


@triton.jit
def _whole(exact):
    """Numbers from 0 on as int64, rounded half to even."""
    return tl.where(exact < _ROUND_TO_WHOLE, (exact + _ROUND_TO_WHOLE) - _ROUND_TO_WHOLE, exact).to(
        tl.int64
    )


@triton.jit
def _part_of(number, share):
    """number share / 2^53, of numbers below 2^62 and shares up to 2^53: the quotient and if there is a rest."""
    low = number.to(tl.uint64) * share.to(tl.uint64)
    high = tl.umulhi(number.to(tl.uint64), share.to(tl.uint64))
    return ((high << 11) | (low >> 53)).to(tl.int64), (low & 0x1FFFFFFFFFFFFF) != 0


@triton.jit
def _goal(total, share):
    """Least weight that has a share of the total: at least 1."""
    whole, rest = _part_of(total, share)
    return tl.maximum(whole + rest.to(tl.int64), 1)


@triton.jit
def _uniform_bits(seed, position):
    """Random number below 2^53 of a seed and a position, by Philox4x32-10."""
    c0, c1 = position.to(tl.uint32), (position.to(tl.uint64) >> 32).to(tl.uint32)
    c2, c3 = c0 ^ c0, c0 ^ c0
    k0, k1 = seed.to(tl.uint32), (seed.to(tl.uint64) >> 32).to(tl.uint32)
    for _ in range(10):
        high0, low0 = tl.umulhi(c0, c2 * 0 + 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, c2 * 0 + 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return ((c1.to(tl.uint64) << 32) | c0.to(tl.uint64)) >> 11


@triton.jit
def _kept(logits_ptr, columns, vocab, limits):
    """Weights of tokens [block] that are kept, 0 of others, with their orders, powers and exact weights.

    `limits` are the highest logit, the factor of powers, the lowest power and the lowest order that are kept, and
    the order and the highest id of the last token of a nucleus.
    """
    highest, scale, lowest, kth, nucleus, nucleus_end = limits
    x = tl.load(logits_ptr + columns, columns < vocab, float("-inf"))
    power, exact = _weighed(x, highest, scale)
    order = _ordered(x)
    kept = (columns < vocab) & (power >= lowest) & (order >= kth)
    kept = kept & ((order > nucleus) | ((order == nucleus) & (columns <= nucleus_end)))
    return tl.where(kept, _whole(exact), 0), order, power, exact


@triton.jit
def _distances(power, mean):
    """Whole numbers below 2^32 that are higher the nearer a power is to the mean."""
    return 4294967295 - tl.abs(power - mean).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _ranked(
    logits_ptr, columns, vocab, limits, mean,
    typical: tl.constexpr,
):  # fmt: skip
    """Weights of kept tokens, and what orders them: their logits, or how near their powers are to a mean."""
    weight, order, power, _exact = _kept(logits_ptr, columns, vocab, limits)
    if typical:
        order = _distances(power, mean)
    return weight, order


@triton.jit
def _near(
    logits_ptr, columns, vocab, limits, mean, nearest, nearest_end,
):  # fmt: skip
    """Weights of kept tokens whose powers are near to a mean, as far as `nearest`; 0 of others."""
    weight, near = _ranked(logits_ptr, columns, vocab, limits, mean, True)
    return tl.where((near > nearest) | ((near == nearest) & (columns <= nearest_end)), weight, 0)


@triton.jit
def _kept_in_all(logits_ptr, vocab, limits, block: tl.constexpr):
    """Weight of all kept tokens, and how many have one."""
    total, positive = limits[3] * 0, limits[3] * 0
    for start in range(0, vocab, block):
        columns = start + tl.arange(0, block)
        weight, _order, _power, _exact = _kept(logits_ptr, columns, vocab, limits)
        total += tl.sum(weight)
        positive += tl.sum((weight > 0).to(tl.int64))
    return total, positive


@triton.jit
def _threshold(
    logits_ptr, vocab, goal, limits, mean,
    counts: tl.constexpr, typical: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The highest order at or above which tokens have a weight of `goal`, or are so many."""
    found = goal * 0
    for step in range(16):
        shift = 30 - 2 * step
        first, second, third = (
            found + ((goal * 0 + 1) << shift),
            found + ((goal * 0 + 2) << shift),
            found + ((goal * 0 + 3) << shift),
        )
        one, two, three = goal * 0, goal * 0, goal * 0
        for start in range(0, vocab, block):
            columns = start + tl.arange(0, block)
            weight, order = _ranked(logits_ptr, columns, vocab, limits, mean, typical)
            if counts:
                weight = (columns < vocab).to(tl.int64)
            one += tl.sum(tl.where(order >= first, weight, 0))
            two += tl.sum(tl.where(order >= second, weight, 0))
            three += tl.sum(tl.where(order >= third, weight, 0))
        digit = (
            (one >= goal).to(tl.int64) + (two >= goal).to(tl.int64) + (three >= goal).to(tl.int64)
        )
        found += digit << shift
    return found


@triton.jit
def _last_kept(
    logits_ptr, vocab, goal, found, limits, mean,
    typical: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The highest id among tokens of the order `found` in front of which weights do not add up to `goal`."""
    above = goal * 0
    for start in range(0, vocab, block):
        columns = start + tl.arange(0, block)
        weight, order = _ranked(logits_ptr, columns, vocab, limits, mean, typical)
        above += tl.sum(tl.where(order > found, weight, 0))
    last = -1
    for start in range(0, vocab, block):
        columns = start + tl.arange(0, block)
        weight, order = _ranked(logits_ptr, columns, vocab, limits, mean, typical)
        equal = tl.where(order == found, weight, 0)
        before = above + tl.cumsum(equal, 0) - equal
        last = tl.maximum(last, tl.max(tl.where((order == found) & (before < goal), columns, -1)))
        above += tl.sum(equal)
    return last


@triton.jit
def _mean_power(logits_ptr, vocab, limits, block: tl.constexpr):
    """Mean power of the kept tokens, and their weight."""
    total, products = limits[3] * 0, limits[3] * 0
    for start in range(0, vocab, block):
        columns = start + tl.arange(0, block)
        weight, _order, power, exact = _kept(logits_ptr, columns, vocab, limits)
        product = -_whole(-(exact * tl.maximum(power, -60.0)))
        products += tl.sum(tl.where(weight > 0, product, 0))
        total += tl.sum(weight)
    return (products.to(tl.float64) / total.to(tl.float64)).to(tl.float32), total


@triton.jit
def _drawn(logits_ptr, packed_ptr, vocab, highest, block: tl.constexpr):
    """The token that is drawn of logits whose highest is finite."""
    scale, lowest = _float(packed_ptr, _SCALE), _float(packed_ptr, _LOWEST)
    top_k, top_p = tl.load(packed_ptr + _TOP_K), tl.load(packed_ptr + _TOP_P)
    typical_p = tl.load(packed_ptr + _TYPICAL_P)
    kth, nucleus, nucleus_end = top_k * 0, top_k * 0 - 1, -1
    mean = highest * 0.0
    limits = (highest, scale, lowest, kth, nucleus, nucleus_end)
    total, positive = _kept_in_all(logits_ptr, vocab, limits, block)
    if (top_k > 0) & (top_k < positive):
        kth = _threshold(logits_ptr, vocab, top_k, limits, mean, True, False, block)
        of_first = (highest, scale, lowest, kth, nucleus, nucleus_end)
        total, _positive = _kept_in_all(logits_ptr, vocab, of_first, block)
    limits = (highest, scale, lowest, kth, nucleus, nucleus_end)
    if top_p < _CERTAIN:
        goal = _goal(total, top_p)
        found = _threshold(logits_ptr, vocab, goal, limits, mean, False, False, block)
        nucleus_end = _last_kept(logits_ptr, vocab, goal, found, limits, mean, False, block)
        nucleus = found
    limits = (highest, scale, lowest, kth, nucleus, nucleus_end)
    nearest, nearest_end = top_k * 0 - 1, -1
    if typical_p < _CERTAIN:
        mean, total = _mean_power(logits_ptr, vocab, limits, block)
        goal = _goal(total, typical_p)
        nearest = _threshold(logits_ptr, vocab, goal, limits, mean, False, True, block)
        nearest_end = _last_kept(logits_ptr, vocab, goal, nearest, limits, mean, True, block)
    total = top_k * 0
    for start in range(0, vocab, block):
        columns = start + tl.arange(0, block)
        weight = _near(logits_ptr, columns, vocab, limits, mean, nearest, nearest_end)
        total += tl.sum(weight)
    seed, position = tl.load(packed_ptr + _SEED), tl.load(packed_ptr + _POSITION)
    target, _rest = _part_of(total, _uniform_bits(seed, position))
    token, below = vocab, top_k * 0
    for start in range(0, vocab, block):
        columns = start + tl.arange(0, block)
        weight = _near(logits_ptr, columns, vocab, limits, mean, nearest, nearest_end)
        passed = below + tl.cumsum(weight, 0) > target
        token = tl.minimum(token, tl.min(tl.where(passed, columns, vocab)))
        below += tl.sum(weight)
    return token


@triton.jit
def draw(raw_ptr, logits_ptr, packed_ptr, found_ptr, vocab, width, block: tl.constexpr):
    """Outcome and token of a row, of its own logits `raw` and of those that its rules have left."""
    row = tl.program_id(0).to(tl.int64)
    raw_ptr += row * vocab
    logits_ptr += row * vocab
    packed_ptr += row * _COLUMNS
    found_ptr += row * width
    broken, overflown, winner, highest = 0, 0, 0, float("-inf")
    for start in range(0, vocab, block):
        columns = start + tl.arange(0, block)
        raw = tl.load(raw_ptr + columns, columns < vocab, 0.0)
        broken += tl.sum((~is_finite(raw)).to(tl.int32))
        x = tl.load(logits_ptr + columns, columns < vocab, float("-inf"))
        overflown += tl.sum((x != x).to(tl.int32))
        own = tl.max(x)
        place = tl.min(tl.where(x == own, columns, vocab))
        winner = tl.where(own > highest, place, winner)
        highest = tl.maximum(own, highest)
    outcome = tl.where(overflown > 0, 2, 0)
    if outcome == 0:
        if highest == float("-inf"):
            outcome = tl.where(tl.load(packed_ptr + _FORBIDS) > 0, 3, 2)
        elif highest == float("inf"):
            outcome = 2
    if broken > 0:
        outcome = 1
    if (outcome == 0) & (tl.load(packed_ptr + _GREEDY) == 0):
        winner = _drawn(logits_ptr, packed_ptr, vocab, highest, block)
    tl.store(found_ptr, outcome.to(tl.int64))
    tl.store(found_ptr + 1, tl.where(outcome == 0, winner, -1).to(tl.int64))


# ---- rules


@triton.jit
def mask(logits_ptr, masks_ptr, packed_ptr, changed_ptr, vocab, words, block: tl.constexpr):
    """Copies logits, with minus infinity for tokens that a row's mask does not allow."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(logits_ptr + row * vocab + columns, columns < vocab, 0.0)
    known = tl.where(tl.load(packed_ptr + row * _COLUMNS + _MASKED) > 0, vocab, 0)
    bits = tl.load(masks_ptr + row * words + columns // 32, columns < known, -1)
    x = tl.where((bits >> (columns % 32)) & 1 != 0, x, float("-inf"))
    tl.store(changed_ptr + row * vocab + columns, x, columns < vocab)


@triton.jit
def edit(changed_ptr, packed_ptr, edits_ptr, count, vocab, kind: tl.constexpr, block: tl.constexpr):
    """Changes the logit of each edit (row, token, bits of a number): stops, biases, or penalties."""
    places = tl.program_id(0) * block + tl.arange(0, block)
    there = places < count
    row = tl.load(edits_ptr + places * 3, there, 0)
    own = changed_ptr + row * vocab + tl.load(edits_ptr + places * 3 + 1, there, 0)
    number = tl.load(edits_ptr + places * 3 + 2, there, 0).to(tl.int32).to(tl.float32, bitcast=True)
    x = tl.load(own, there, 0.0)
    if kind == "stops":
        x = tl.full([block], float("-inf"), tl.float32)
    elif kind == "biases":
        x = x + number
    else:
        rules = packed_ptr + row * _COLUMNS
        repetition = _float(rules, _REPETITION, there)
        frequency = _float(rules, _FREQUENCY, there)
        presence = _float(rules, _PRESENCE, there)
        penalised = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(repetition == 1.0, x, penalised)
        x = x - number * frequency
        x = x - (number > 0.0).to(tl.float32) * presence
    tl.store(own, x, there)


# ---- reports


@triton.jit
def report(logits_ptr, found_ptr, vocab, width, most: tl.constexpr, block: tl.constexpr):
    """Rank of a row's token, the likeliest tokens, and what their log-probabilities are made of."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    found_ptr += row * width
    token = tl.maximum(tl.load(found_ptr + 1), 0)
    value = tl.load(logits_ptr + token)
    highest, broken = float("-inf"), 0
    rank = token * 0 + 1
    for start in range(0, vocab, block):
        columns = start + tl.arange(0, block)
        x = tl.load(logits_ptr + columns, columns < vocab, float("-inf"))
        broken += tl.sum((~is_finite(x) & (columns < vocab)).to(tl.int32))
        highest = tl.maximum(highest, tl.max(x))
        rank += tl.sum((x > value).to(tl.int64))
    if broken > 0:
        tl.store(found_ptr, token * 0 + 1)
    else:
        total = token * 0
        for start in range(0, vocab, block):
            columns = start + tl.arange(0, block)
            x = tl.load(logits_ptr + columns, columns < vocab, float("-inf"))
            power, exact = _weighed(x, highest, 1.4426950408889634)
            total += tl.sum(tl.where(power >= -40.0, _whole(exact), 0))
        tl.store(found_ptr + 2, rank)
        tl.store(found_ptr + 3, total)
        bits = highest.to(tl.int32, bitcast=True)  # type: ignore[attr-defined]
        tl.store(found_ptr + 4, bits.to(tl.int64))
        tl.store(found_ptr + 5, value.to(tl.int32, bitcast=True).to(tl.int64))
        last_order, last = token * 0 + 4294967296, -1
        for place in range(most):
            best_order, best = token * 0 - 1, 0
            for start in range(0, vocab, block):
                columns = start + tl.arange(0, block)
                x = tl.load(logits_ptr + columns, columns < vocab, float("-inf"))
                order = _ordered(x)
                left = (order < last_order) | ((order == last_order) & (columns > last))
                order = tl.where(left & (columns < vocab), order, -1)
                own = tl.max(order)
                first = tl.min(tl.where(order == own, columns, vocab))
                best = tl.where(own > best_order, first, best)
                best_order = tl.maximum(own, best_order)
            last_order, last = best_order, best
            of_best = tl.load(logits_ptr + best).to(tl.int32, bitcast=True).to(tl.int64)
            tl.store(found_ptr + _FIXED + place, token * 0 + best)
            tl.store(found_ptr + _FIXED + most + place, of_best)
