# SPDX-License-Identifier: Apache-2.0
"""KV groups (`pagoda.messages.kv_groups`), and the manager with several of them."""

from __future__ import annotations

import sys

import msgspec
import pytest
from group_models import EVERY, GEMMA_LIKE, NAMES, grouped, state
from hypothesis import given
from hypothesis import strategies as st

from pagoda.kv.block_table import BlockTable
from pagoda.kv.manager import KVManager
from pagoda.messages.kv_groups import KVGroup, KVKind, full_group, layer_groups

FULL, WINDOW = (KVKind.FULL, 0), (KVKind.WINDOW, 9)


def go_on(kv: KVManager, table: BlockTable, tokens: list[int], end: int) -> None:
    """Computes tokens up to `end` at once."""
    assert kv.grow(table, end) is not None
    kv.publish(table, tokens, end)
    kv.drop_behind(table, end, -1)


def computed(kv: KVManager, tokens: list[int], step: int = 4) -> BlockTable:
    """The table of a request that has computed `tokens`, some at a time."""
    table = kv.new_table()
    hit = kv.find_prefix(table, tokens)
    kv.adopt(table, hit)
    for end in range(hit.num_blocks * kv.block_size + step, len(tokens) + step, step):
        go_on(kv, table, tokens, min(end, len(tokens)))
    return table


def num_hits(kv: KVManager, tokens: list[int]) -> int:
    """Tokens of the cached prefix of `tokens` and one more."""
    return kv.find_prefix(kv.new_table(), [*tokens, 0]).num_blocks * kv.block_size


def test_a_rare_kind_decides_how_many_layers_share_a_block() -> None:
    groups = layer_groups(GEMMA_LIKE * 4 + [(KVKind.WINDOW, 1024)] * 2, 16, 64)
    assert [len(group.layers) for group in groups] == [4, 4, 4, 4, 4, 3, 3]
    assert [group.kind for group in groups] == [KVKind.FULL] + [KVKind.WINDOW] * 6
    assert sorted(layer for group in groups for layer in group.layers) == list(range(26))
    assert {group.window_multiple for group in groups[1:]} == {64}


def test_layers_of_one_kind_are_one_group() -> None:
    assert layer_groups([FULL] * 5, 16) == (full_group(5, 16),)
    (group,) = layer_groups([WINDOW] * 5, 16)
    assert (group.layers, group.window) == ((0, 1, 2, 3, 4), 9)


def test_kinds_of_almost_equal_frequency_are_not_divided() -> None:
    groups = layer_groups([FULL] * 9 + [WINDOW] * 10, 16)
    assert [len(group.layers) for group in groups] == [9, 10]


@pytest.mark.parametrize(
    ("kind", "window", "multiple", "firsts"),
    [
        (KVKind.FULL, 0, 1, {0: 0, 7: 0, 100: 0}),
        (KVKind.WINDOW, 9, 1, {0: 0, 8: 0, 9: 1, 100: 92}),
        (KVKind.WINDOW, 9, 8, {0: 0, 9: 0, 15: 0, 16: 8, 100: 88}),
        (KVKind.CHUNK, 8, 1, {0: 0, 7: 0, 8: 8, 100: 96}),
        (KVKind.STATE, 0, 1, {0: 0, 1: 0, 8: 7, 100: 99}),
    ],
)
def test_the_first_token_that_is_read(
    kind: KVKind, window: int, multiple: int, firsts: dict[int, int]
) -> None:
    group = KVGroup(layers=(0,), kind=kind, block_size=4, window=window, window_multiple=multiple)
    assert {n: group.first_token(n) for n in firsts} == firsts


@given(
    st.sampled_from(NAMES), st.integers(1, 3), st.sampled_from([1, 2, 16, 64]), st.integers(0, 20)
)
def test_blocks_are_needed_until_their_last_use(
    name: str, block_size: int, multiple: int, index: int
) -> None:
    for group in grouped(name, block_size):
        group = msgspec.structs.replace(group, window_multiple=multiple)
        last = group.last_use(index)
        if group.keeps_all:
            assert last == sys.maxsize
        else:
            assert group.first_block(last) <= index < group.first_block(last + 1)


@given(
    st.sampled_from(NAMES),
    st.integers(0, 90),
    st.integers(0, 60),
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.integers(1, 20),
)
def test_no_course_of_a_sequence_holds_more_than_most_blocks(
    name: str, start: int, more: int, chunks: list[int], run: int
) -> None:
    for group in grouped(name, 4):
        end = start + more
        most = group.most_blocks(start, end, run)
        done, scheduled = start, start
        for chunk in [*chunks, *[run] * (more + 1)]:
            scheduled = min(end, scheduled + chunk, done + run)
            held = group.num_blocks_for(scheduled) - group.first_block(done)
            assert held <= most
            done = scheduled if chunk % 2 else done
            done = scheduled if scheduled == done + run else done


@given(
    st.sampled_from(EVERY),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 60),
    st.integers(1, 20),
)
def test_going_on_from_a_longer_prefix_takes_no_more_blocks(
    name: str, start: int, more: int, rest: int, run: int
) -> None:
    """So what tiers have of a prefix fits where the request fits without it."""
    for group in grouped(name, 4):
        longer, end = start + more, start + more + rest
        most = group.most_blocks(longer, end, run)
        assert group.num_blocks_for(longer) - group.first_block(longer) <= most
        assert most <= group.most_blocks(start, end, run)


def test_what_lies_behind_a_window_is_given_back_and_stays_cached() -> None:
    kv = KVManager(32, 4, groups=layer_groups([WINDOW], 4))
    tokens = list(range(40))
    table = computed(kv, tokens)
    (held,) = table.groups
    assert (held.first, len(held.blocks)) == (8, 2)
    assert table.block_ids()[0][:8] == [0] * 8
    assert kv.pool.num_available == 30
    assert num_hits(kv, tokens) == 40
    assert num_hits(kv, tokens[:20]) == 20  # until somebody needs the blocks


def test_a_prefix_needs_all_of_full_groups_and_the_window_of_others() -> None:
    kv = KVManager(64, 4, groups=layer_groups([FULL, WINDOW], 4))
    tokens = list(range(40))
    table = computed(kv, tokens)
    full, window = table.groups
    assert (len(full.blocks), len(window.blocks)) == (10, 2)
    hit = kv.find_prefix(kv.new_table(), [*tokens, 0])
    assert hit.num_blocks == 10
    assert list(hit.firsts) == [0, 8]
    assert [len(blocks) for blocks in hit.groups] == [10, 2]
    for block in kv.pool.allocate(kv.pool.num_available - 4):  # drives out what is behind
        kv.pool.release([block])
    assert num_hits(kv, tokens) == 40
    assert num_hits(kv, tokens[:20]) == 0
    kv.pool.discard(window.blocks[-1].key or b"")
    assert num_hits(kv, tokens) < 40
    kv.pool.discard(full.blocks[3].key or b"")
    assert num_hits(kv, tokens) <= 12


@pytest.mark.parametrize("num_blocks", range(16, 32))
def test_what_is_admitted_beside_a_request_that_shares_its_prefix_fits(num_blocks: int) -> None:
    """Blocks of a window that both hold are left behind by one of them, without being free."""
    kv = KVManager(num_blocks, 4, groups=layer_groups([FULL, WINDOW], 4), run_tokens=4)
    tokens = list(range(24))
    computed(kv, tokens)
    longer, table = [*tokens, *range(100, 124)], kv.new_table()
    hit = kv.find_prefix(table, longer)
    assert min(hit.num_shared()) > 0
    if kv.num_blocks_behind(hit, len(longer)) <= kv.pool.num_available:
        kv.adopt(table, hit)
        for end in range(hit.num_blocks * 4 + 4, len(longer) + 1, 4):
            go_on(kv, table, longer, end)
    else:
        assert num_blocks < 20


def test_blocks_behind_a_window_are_evicted_before_what_others_may_want() -> None:
    kv = KVManager(24, 4, groups=layer_groups([WINDOW], 4))
    old = list(range(100, 120))
    kv.free(computed(kv, old))
    computed(kv, list(range(40)))
    for block in kv.pool.allocate(kv.pool.num_available - 2):
        kv.pool.release([block])
    assert num_hits(kv, old) == 20


def test_beginnings_that_several_share_are_kept_like_others() -> None:
    kv = KVManager(64, 4, groups=layer_groups([WINDOW], 4))
    shared = list(range(16))
    kv.free(computed(kv, [*shared, *range(50, 70)]))
    for first in (100, 200):
        kv.free(computed(kv, [*shared, *range(first, first + 20)]))
    for block in kv.pool.allocate(56):  # drives out what is behind, which nobody shared
        kv.pool.release([block])
    assert num_hits(kv, shared) == 16


def test_a_state_keeps_one_block_and_a_snapshot_of_each_full_one() -> None:
    kv = KVManager(64, 4, groups=(full_group(1, 4), state(8)))
    tokens = list(range(38))
    table = computed(kv, tokens)
    full, states = table.groups
    assert (len(full.blocks), states.first, len(states.blocks)) == (10, 4, 1)
    assert num_hits(kv, tokens) == 32  # the last snapshot, though more K and V are there
    assert num_hits(kv, tokens[:31]) == 24
    again = kv.new_table()
    hit = kv.find_prefix(again, tokens)
    kv.adopt(again, hit)
    assert again.groups[1].blocks == hit.groups[1]
    snapshot = again.groups[1].blocks[0]
    go_on(kv, again, tokens, 38)
    assert snapshot not in again.groups[1].blocks  # the next tokens have a block of their own


def test_blocks_of_groups_have_keys_of_their_own() -> None:
    kv = KVManager(64, 4, groups=layer_groups([FULL, WINDOW, WINDOW], 4))
    table = computed(kv, list(range(8)))
    keys = {block.key for block in table.blocks}
    assert len(keys) == len(table.blocks) == 6
    assert set(kv.pool.keys()) == set(table.keys[1:])  # others know prefixes by those of group 0


def test_a_pool_that_holds_no_window_and_chunk_is_refused() -> None:
    kv = KVManager(12, 4, groups=layer_groups([FULL, WINDOW], 4), run_tokens=32)
    assert kv.fit(28)
    assert kv.run_tokens == 8
    assert not kv.fit(64)
