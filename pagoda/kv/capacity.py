# SPDX-License-Identifier: Apache-2.0
"""Capacity for requests that are streamed: what the device holds of one, and the storeys below it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

from pagoda.messages.kv_groups import KVGroup, full_group
from pagoda.messages.worker import WorkerReady
from pagoda.messages.worker_config import KVTierConfig

_BEHIND_SHARE = 4
_USABLE_PERCENT = 95
"""Percentage of a tier's bytes that running requests may hold: a tier removes others before it is full."""


def segment_blocks(groups: Sequence[KVGroup], segment_tokens: int) -> int:
    """Blocks of a segment of a sequence, in all groups that keep all."""
    return sum(segment_tokens // group.block_size for group in groups if group.keeps_all)


def resident_tokens(
    groups: Sequence[KVGroup],
    num_blocks: int,
    num_tokens: int,
    run_tokens: int,
    segment_tokens: int,
) -> int:
    """Tokens of a sequence of `num_tokens` that lie on a device of `num_blocks` while those before them lie in
    storeys below it: half of what it holds, or a segment and a quarter; 0 if it holds too little for that.

    The device holds a segment and some tokens behind it at least, so that one can be filled after the other."""
    kept = [group.block_size for group in groups if group.keeps_all]
    unit = max(kept, default=0)
    if not unit or not segment_tokens or segment_tokens % unit:
        return 0
    others = sum(
        group.most_blocks(0, num_tokens, run_tokens) for group in groups if not group.keeps_all
    )
    fitting = (num_blocks - others) // sum(unit // size for size in kept) * unit
    if fitting < segment_tokens + unit:
        return 0
    half = (fitting // 2 // unit - 2) * unit  # so that two find room
    behind = max(unit, segment_tokens // _BEHIND_SHARE // unit * unit)
    return min(fitting, max(segment_tokens + behind, half))


def streamed_from(
    groups: Sequence[KVGroup],
    num_blocks: int,
    num_tokens: int,
    run_tokens: int,
    segment_tokens: int,
) -> int:
    """Tokens from which on a sequence, of at most `num_tokens`, has no room for a further segment on a device of
    `num_blocks`."""
    return bisect_right(
        range(num_tokens),
        num_blocks,
        key=lambda count: sum(
            group.most_blocks(0, count + segment_tokens, run_tokens) for group in groups
        ),
    )


def num_cold_segments(
    ready: WorkerReady, tiers: Mapping[str, KVTierConfig], segment_tokens: int
) -> int:
    """Segments of requests that host memory and plugins' tiers, by name, hold together, each as a whole in one."""
    groups = ready.kv_groups or (full_group(0, ready.block_size),)
    each = segment_blocks(groups, segment_tokens)
    if not each:
        return 0
    total = ready.kv_host_slots // each
    for name, tier in tiers.items():
        by_host = Counter[str]()  # each of which has a disk of its own
        places = ready.places_of(name)
        for place in places:
            by_host[place.host] += place.block_bytes
        block_bytes = max(by_host.values(), default=0)
        if block_bytes:
            sharers = max(place.num_sharers for place in places)
            total += usable_blocks(tier, block_bytes, sharers) // each
    return total


def usable_blocks(tier: KVTierConfig, block_bytes: int, num_sharers: int) -> int:
    """Blocks of so many bytes, on all ranks together, that running requests of one of `num_sharers` replicas may
    hold in a tier."""
    return tier.num_bytes * _USABLE_PERCENT // 100 // num_sharers // block_bytes
