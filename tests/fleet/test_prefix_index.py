# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operations import assert_linear

from pagoda.fleet.prefix_index import CacheUnion, PrefixIndex, packed, short_keys, short_keys_in
from pagoda.kv.block_keys import prefix_keys
from pagoda.kv.layout import KVLayout
from pagoda.kv.manager import KVManager
from pagoda.messages.frontend import PrefixCacheUpdate
from pagoda.messages.kv_groups import KVGroup, KVKind


def keys(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def news(
    stored: list[int], removed: list[int] | None = None, *, anew: bool = False
) -> PrefixCacheUpdate:
    return PrefixCacheUpdate(packed(stored), packed(removed or []), starts_anew=anew)


A, B, C = 100, 200, 300


# ---- what was sent, while the replica says nothing


def test_what_was_not_sent_for_longest_goes_first_and_ends_before_roots() -> None:
    index = PrefixIndex(5)
    index.add(keys(A, 3))
    assert [index.num_cached(some) for some in (keys(A, 5), keys(A, 2), keys(B, 2), [])] == [
        *(3, 2, 0, 0)
    ]
    index.add(keys(B, 2))
    index.add(keys(A, 1))
    index.add(keys(C, 2))
    assert len(index) == 5
    assert index.num_cached(keys(A, 3)) == 1
    assert index.num_cached(keys(B, 2)) == 2
    assert index.num_cached(keys(C, 2)) == 2
    index.add(keys(A, 9))
    assert index.num_cached(keys(A, 9)) == 5


def test_requests_that_begin_alike_are_counted_while_they_are_there() -> None:
    index = PrefixIndex(9)
    first, second = index.add(keys(A, 3)), index.add(keys(A, 2))
    assert [index.num_sharing(key) for key in keys(A, 4)] == [2, 2, 1, 0]
    index.end(first, keys(A, 3))
    assert [index.num_sharing(key) for key in keys(A, 4)] == [1, 1, 0, 0]
    index.apply(news(keys(B, 2), anew=True))
    index.clear()  # its engine is lost
    assert len(index) == index.num_cached(keys(A, 2)) == index.num_cached(keys(B, 2)) == 0
    index.end(second, keys(A, 2))
    assert index.num_running == {}


# ---- what the replica says


def test_what_the_replica_says_counts_however_long_ago_it_was_sent() -> None:
    index = PrefixIndex(2)
    index.apply(news(keys(A, 5), anew=True))
    index.add(keys(B, 2))
    assert index.num_cached(keys(A, 5)) == 5
    assert index.num_cached(keys(B, 2)) == 2
    index.apply(news([], [A + 3, A + 4]))
    assert index.num_cached(keys(A, 5)) == 3


def test_what_was_sent_and_never_stored_is_forgotten_with_the_second_news_after_the_end() -> None:
    index = PrefixIndex(9)
    index.apply(news([], anew=True))
    first, second = index.add(keys(A, 4)), index.add(keys(A, 2))
    index.apply(news(keys(A, 1)))
    index.end(first, keys(A, 4))
    index.apply(news([]))
    assert index.num_cached(keys(A, 4)) == 4
    index.apply(news([]))
    assert index.num_cached(keys(A, 4)) == 2  # until the second has ended too
    index.end(second, keys(A, 2))
    for _ in range(2):
        index.apply(news([]))
    assert index.num_cached(keys(A, 4)) == len(index) == 1


def test_a_replica_that_never_has_news_is_known_by_no_more_than_its_cache_has_room_for() -> None:
    index = PrefixIndex(9)
    index.apply(news([], anew=True))
    for first in [A] * 100 + list(range(100)):
        index.end(index.add(keys(first, 4)), keys(first, 4))
        assert index.ended.keys() <= index.sent.keys()
    assert len(index.sent) == 9
    for _ in range(2):
        index.apply(news([]))
    assert len(index) == len(index.ended) == 0


@given(st.data())
def test_believed_is_what_was_said_and_what_is_on_its_way(data: st.DataObject) -> None:
    index = PrefixIndex(1000)
    index.apply(news([], anew=True))
    there: set[int] = set()
    running: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["add", "end", "news", "anew", "clear"]))
        some = data.draw(st.lists(st.integers(0, 9), unique=True))
        if action == "add":
            running[index.add(some)] = some
        elif action == "end" and running:
            number = data.draw(st.sampled_from(list(running)))
            index.end(number, running.pop(number))
        elif action == "news":
            removed = [k for k in data.draw(st.lists(st.integers(0, 9))) if k not in some]
            index.apply(news(some, removed))
            there = (there | set(some)) - set(removed)
        elif action == "anew":
            index.apply(news(some, anew=True))
            there = set(some)
        elif action == "clear":
            index.clear()
            index.apply(news([], anew=True))
            there = set()
            running.clear()
        assert index.told == there
        assert all(index.num_cached([key]) for key in there)
        assert index.ended.keys() <= index.sent.keys()
    for number, some in running.items():
        index.end(number, some)
    for _ in range(2):
        index.apply(news([]))
    assert len(index) == len(there)


# ---- what several replicas have together

small = st.lists(st.integers(0, 7), unique=True)


@given(st.data())
def test_listeners_know_what_all_replicas_have_together(data: st.DataObject) -> None:
    union = CacheUnion()
    indexes: list[PrefixIndex] = []
    listeners: list[PrefixIndex] = []
    actions = ["join", "leave", "update", "anew", "clear", "listen"]
    for number in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(actions))
        if action == "join":
            indexes.append(PrefixIndex(100, replica=number, union=union))
        elif action == "listen":
            listeners.append(PrefixIndex(100))
            union.listen(listeners[-1].apply)
        elif indexes:
            index = data.draw(st.sampled_from(indexes))
            stored = data.draw(small)
            if action in ("leave", "clear"):
                index.clear()
                if action == "leave":
                    indexes.remove(index)
            else:
                removed = [key for key in data.draw(small) if key not in stored]
                is_new = action == "anew"
                index.apply(news(stored, removed, anew=is_new))
        whole: set[int] = set().union(*(index.told for index in indexes))
        assert all(listener.told == whole for listener in listeners)


def test_listeners_are_told_what_changes_for_all_replicas_together_until_they_end() -> None:
    union = CacheUnion()
    first, second = (PrefixIndex(9, replica=number, union=union) for number in range(2))
    heard: list[PrefixCacheUpdate] = []
    end = union.listen(heard.append)
    first.apply(news([1, 2], anew=True))
    first.apply(news([2, 3], [1, 7]))
    first.apply(news([3, 4], anew=True))
    second.apply(news([3]))
    first.clear()
    assert heard == [
        *(news([], anew=True), news([1, 2]), news([3], [1]), news([4], [2]), news([], [4]))
    ]
    end()
    first.apply(news([1]))
    assert len(heard) == 5


def test_holders_of_a_popular_prefix_take_turns_and_have_the_least_work() -> None:
    union, chain = CacheUnion(), keys(A, 4)
    for number in range(200):
        union.change(number, chain, ())
    work = {number: number * 7 % 200 for number in range(200)}
    seen = [union.holders(chain, 8, work.__getitem__, turn) for turn in range(40)]
    assert all(len(set(some)) == 8 for some in seen)
    assert all(sorted(some, key=work.__getitem__) == some for some in seen)
    assert len(set().union(*seen)) > 40
    assert sum(map(work.__getitem__, seen[0])) < 8 * 60


def test_holders_of_the_longest_prefix_come_first() -> None:
    union = CacheUnion()
    chain = list(range(100, 116))
    told, sent, short, other = (
        PrefixIndex(100, replica=number, union=union) for number in range(4)
    )
    told.apply(news(chain[:12]))
    sent.add(chain[:12])
    short.apply(news(chain[:6]))
    other.add([7, 8])
    assert union.holders(chain, 8) == [0, 1, 2]
    assert union.holders(chain, 1) == [0]
    assert union.holders([1, 2], 8) == []
    told.clear()
    assert union.holders(chain, 8) == [1, 2]
    sent.clear()
    assert union.holders(chain, 8) == [2]


# ---- models whose layers keep a part of a prefix only

WINDOW = KVLayout(
    4, [KVGroup(layers=(0,), kind=KVKind.WINDOW, block_size=4, window=9, window_multiple=4)]
)
"""The token behind a prefix needs its last two blocks."""
STATE = KVLayout(4, [KVGroup(layers=(0,), kind=KVKind.STATE, block_size=8)])


@pytest.mark.parametrize(
    ("layout", "told", "length"),
    [
        (WINDOW, [6, 7], 8),
        (WINDOW, [5, 6, 8], 7),
        (WINDOW, [1, 3, 5, 7], 0),
        (WINDOW, [0, 2, 4, 6, 8], 1),
        (WINDOW, [], 0),
        (STATE, [5, 8], 6),
        (STATE, [3, 6], 4),
        (STATE, [0, 2, 4], 0),
    ],
)
def test_what_the_token_behind_a_prefix_needs_is_enough(
    layout: KVLayout, told: list[int], length: int
) -> None:
    """`told` are the places of blocks in the prefix."""
    union = CacheUnion(layout)
    index, idle = (PrefixIndex(100, replica=number, union=union) for number in range(2))
    index.apply(news([A + place for place in told]))
    assert index.num_cached(keys(A, 9)) == index.num_told(keys(A, 9)) == length
    assert idle.num_cached(keys(A, 9)) == 0
    assert union.holders(keys(A, 9), 8) == ([0] if length else [])


def test_a_prompt_on_its_way_is_believed_to_leave_what_a_window_needs() -> None:
    index = PrefixIndex(100, union=CacheUnion(WINDOW))
    index.add(keys(A, 9))
    assert index.num_cached(keys(A, 9)) == 9
    assert index.num_told(keys(A, 9)) == 0
    index.apply(news(keys(A + 7, 2)))
    assert index.num_told(keys(A, 9)) == 9


def test_a_window_is_looked_for_in_as_many_operations_as_the_prefix_has_blocks() -> None:
    def prepare(count: int) -> Callable[[], None]:
        index = PrefixIndex(100, union=CacheUnion(WINDOW))
        index.apply(news(keys(A, count)[::2]))
        return lambda: check(index, count)

    def check(index: PrefixIndex, count: int) -> None:
        assert index.num_cached(keys(A, count)) == 1

    assert_linear(prepare, (256, 512, 2048))


# ---- keys


def test_keys_are_those_of_the_kv_cache() -> None:
    tokens = list(range(50))
    kv = KVManager(num_blocks=8, block_size=8)
    table = kv.new_table("salt")
    kv.grow(table, 50)
    kv.publish(table, tokens, 50)
    mine = prefix_keys(tokens, 8, "salt", 100)
    assert len(mine) == 6
    assert all(kv.pool.find(key) is not None for key in mine)
    assert prefix_keys(tokens, 8, "other", 100)[0] != mine[0]
    assert prefix_keys(tokens, 8, "salt", 2) == mine[:2]
    assert len(prefix_keys(tokens[:48], 8, "salt", 100)) == 5
    assert prefix_keys([1], 8, None, 100) == []


def test_short_keys_are_the_same_on_the_wire() -> None:
    whole = prefix_keys(list(range(50)), 8, None, 100)
    on_the_wire = b"".join(key[:8] for key in whole)
    assert list(short_keys_in(on_the_wire)) == short_keys(whole)
    assert packed(short_keys(whole)) == on_the_wire
