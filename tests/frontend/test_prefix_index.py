from __future__ import annotations

from pagoda.frontend.prefix_index import PrefixIndex
from pagoda.kv.block_keys import prefix_keys
from pagoda.kv.manager import KVManager


def keys(name: str, count: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(count)]


def test_the_longest_chain_from_the_root_counts() -> None:
    index = PrefixIndex(10)
    index.add(keys("a", 3))
    assert index.num_cached(keys("a", 5)) == 3
    assert index.num_cached(keys("a", 2)) == 2
    assert index.num_cached(keys("b", 2)) == 0
    assert index.num_cached([]) == 0
    assert index.num_cached([b"x", *keys("a", 3)]) == 0


def test_what_was_not_sent_for_longest_goes_first_and_ends_before_roots() -> None:
    index = PrefixIndex(5)
    index.add(keys("a", 3))
    index.add(keys("b", 2))
    index.add(keys("a", 1))
    index.add(keys("c", 2))
    assert len(index) == 5
    assert index.num_cached(keys("a", 3)) == 1
    assert index.num_cached(keys("b", 2)) == 2
    assert index.num_cached(keys("c", 2)) == 2


def test_a_chain_longer_than_the_cache_keeps_its_root() -> None:
    index = PrefixIndex(4)
    index.add(keys("a", 9))
    assert index.num_cached(keys("a", 9)) == 4


def test_after_a_restart_nothing_is_cached() -> None:
    index = PrefixIndex(4)
    index.add(keys("a", 2))
    index.clear()
    assert len(index) == index.num_cached(keys("a", 2)) == 0


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
