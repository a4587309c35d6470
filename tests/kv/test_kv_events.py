# SPDX-License-Identifier: Apache-2.0
"""Events tell exactly what a cache gains and loses, and enough to know which tokens each key stands for."""

from __future__ import annotations

import pytest
from group_models import NAMES as GROUPED
from group_models import grouped
from hypothesis import given
from hypothesis import strategies as st

from pagoda.kv.block_keys import GroupKeys, prefix_keys
from pagoda.kv.block_table import BlockTable
from pagoda.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheRecorder, Medium
from pagoda.kv.manager import KVManager
from pagoda.messages.kv_groups import KVKind

SIZE = 4
SALTS = (None, "tenant-a")

DISK = "DISK"
"""The medium of a plugin's tier."""
MEDIA: list[str] = [*Medium, DISK]


def recorded(num_blocks: int = 8) -> tuple[KVManager, CacheRecorder]:
    events = CacheRecorder()
    return KVManager(num_blocks, SIZE, recorder=events), events


def fill(kv: KVManager, token_ids: list[int], salt: str | None = None) -> BlockTable:
    table = kv.new_table(salt)
    kv.adopt(table, kv.find_prefix(table, token_ids))
    assert kv.grow(table, len(token_ids)) is not None
    kv.publish(table, token_ids, len(token_ids))
    return table


def test_blocks_that_follow_each_other_are_one_event() -> None:
    kv, events = recorded()
    table = fill(kv, list(range(10)))
    assert events.drain() == [BlockStored(table.keys[1:3], None, list(range(8)), SIZE)]
    assert events.drain() == []


def test_evicted_blocks_are_removed_before_their_places_are_filled() -> None:
    kv, events = recorded(2)
    first = fill(kv, list(range(8)))
    kv.free(first)
    second = fill(kv, list(range(10, 18)))
    assert events.drain()[1:] == [
        BlockRemoved([first.keys[2], first.keys[1]]),
        BlockStored(second.keys[1:], None, list(range(10, 18)), SIZE),
    ]


def test_a_lost_device_is_one_event() -> None:
    kv, events = recorded()
    fill(kv, list(range(8)))
    kv.pool.clear_cache()
    assert events.drain()[1:] == [AllBlocksCleared()]


def test_all_tiers_that_are_lost_with_the_workers_are_one_event() -> None:
    events = CacheRecorder()
    for medium in (Medium.DEVICE, Medium.HOST):
        events.lose([(b"key", 0)], medium)
    assert events.drain() == [AllBlocksCleared()]


def test_events_of_a_tier_grow_beside_those_of_another() -> None:
    events = CacheRecorder()
    for index, medium in enumerate(MEDIA * 2):
        step = index // 3
        events.store(b"%d" % step, b"0" if step else None, [step, step], medium)
    for medium in MEDIA:
        events.remove(b"1", medium)
    events.remove(b"0", Medium.HOST)
    stored = [BlockStored([b"0", b"1"], None, [0, 0, 1, 1], 2, medium=medium) for medium in MEDIA]
    removed = [
        BlockRemoved([b"1"]),
        BlockRemoved([b"1", b"0"], Medium.HOST),
        BlockRemoved([b"1"], DISK),
    ]
    assert events.drain() == [*stored, *removed]


def test_events_of_the_disk_are_in_their_order_though_removals_name_no_group() -> None:
    events = CacheRecorder(outlives_workers=True)
    events.remove(b"0", DISK, None)
    for group in (0, 1):
        events.store(b"a%d" % group, None, [1, 2], DISK, group)
    for group in (0, 1):
        events.remove(b"a%d" % group, DISK, None)
    events.store(b"b0", b"a0", [3, 4], DISK)
    events.remove(b"0", Medium.HOST)
    told = [(type(event), event.block_hashes) for event in events.drain()]  # type: ignore[union-attr]
    assert told == [
        (BlockRemoved, [b"0"]),
        (BlockStored, [b"a0"]),
        (BlockStored, [b"a1"]),
        (BlockRemoved, [b"a0", b"a1"]),
        (BlockStored, [b"b0"]),
        (BlockRemoved, [b"0"]),
    ]


@pytest.mark.parametrize("name", GROUPED)
def test_blocks_of_each_group_are_told_with_what_its_layers_keep(name: str) -> None:
    groups, tokens = grouped(name, SIZE), list(range(49))
    events = CacheRecorder(groups)
    kv = KVManager(200, SIZE, groups=groups, recorder=events)
    table = fill(kv, tokens)
    stored = [event for event in events.drain() if isinstance(event, BlockStored)]
    assert [event.group_idx for event in stored] == list(range(len(groups)))
    keys = prefix_keys(tokens, SIZE, None, 100)
    for event, group, ratio in zip(stored, groups, kv.layout.ratios, strict=True):
        view = GroupKeys(keys, event.group_idx, ratio, len(keys) // ratio)
        assert event.block_hashes == list(view)
        assert event.block_size == group.block_size
        assert event.token_ids == tokens[: len(view) * group.block_size]
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == {
            KVKind.FULL: ("full_attention", None),
            KVKind.WINDOW: ("sliding_window", 2 * SIZE + 1),
            KVKind.CHUNK: ("chunked_local_attention", None),
            KVKind.STATE: ("mamba", None),
        }[group.kind]
    kv.free(table)
    kv.pool.release(kv.pool.allocate(kv.pool.num_blocks))
    removed = {
        event.group_idx: set(event.block_hashes)
        for event in events.drain()
        if isinstance(event, BlockRemoved)
    }
    assert removed == {event.group_idx: set(event.block_hashes) for event in stored}


@pytest.mark.parametrize("name", GROUPED)
def test_what_routers_are_told_of_is_group_0(name: str) -> None:
    groups = grouped(name, SIZE)
    events = CacheRecorder(groups, keeps_events=False)
    kv = KVManager(200, SIZE, groups=groups, recorder=events)
    events.changed = {}
    table = fill(kv, list(range(49)))
    ratio = kv.layout.ratios[0]
    own = dict.fromkeys(table.keys[ratio : 12 - 12 % ratio + 1 : ratio])
    assert events.changed == own
    kv.free(table)
    events.changed.clear()
    kv.pool.clear_cache()
    assert events.changed.keys() == own.keys()


def test_without_a_prefix_cache_nothing_is_recorded() -> None:
    events = CacheRecorder()
    kv = KVManager(8, SIZE, prefix_caching=False, recorder=events)
    kv.free(fill(kv, list(range(9))))
    fill(kv, list(range(32)))
    assert events.drain() == []


TIERS = st.sampled_from(MEDIA)
NAMES = st.integers(0, 5)


@given(
    has_disk=st.booleans(),
    changes=st.lists(
        st.one_of(
            st.tuples(st.just("change"), NAMES, TIERS),
            st.tuples(st.just("lose"), st.just(0), st.just(Medium.DEVICE)),
            st.tuples(st.just("take"), st.just(0), st.just(Medium.DEVICE)),
        ),
        max_size=60,
    ),
)
def test_whoever_applies_all_events_knows_what_each_tier_holds(
    has_disk: bool, changes: list[tuple[str, int, str]]
) -> None:
    """Blocks of one chain go in and out of tiers in any order."""
    events = CacheRecorder(outlives_workers=has_disk)
    held: set[tuple[bytes, str]] = set()
    known: set[tuple[bytes, str]] = set()
    tiers = set(MEDIA) if has_disk else {Medium.DEVICE, Medium.HOST}
    for change, name, medium in [*changes, ("take", 0, Medium.DEVICE)]:
        key = b"%d" % name
        if change == "take":
            apply(events, known)
            assert known == held
        elif change == "lose":
            for lost in (Medium.DEVICE, Medium.HOST):
                events.lose([(key, 0) for key, tier in held if tier == lost], lost)
            held = {(key, tier) for key, tier in held if tier == DISK}
        elif medium in tiers and (key, medium) in held:
            events.remove(key, medium, None if medium == DISK else 0)
            held.remove((key, medium))
        elif medium in tiers:
            events.store(key, b"%d" % (name - 1) if name else None, [name], medium)
            held.add((key, medium))


def apply(events: CacheRecorder, known: set[tuple[bytes, str]]) -> None:
    for event in events.drain():
        match event:
            case BlockStored():
                new = {(key, event.medium) for key in event.block_hashes}
                assert len(new) == len(event.block_hashes) == len(event.token_ids)
                assert not new & known
                assert [b"%d" % token for token in event.token_ids] == event.block_hashes
                known |= new
            case BlockRemoved():
                gone = {(key, event.medium) for key in event.block_hashes}
                assert len(gone) == len(event.block_hashes)
                assert gone <= known
                known -= gone
            case AllBlocksCleared():
                known.clear()
