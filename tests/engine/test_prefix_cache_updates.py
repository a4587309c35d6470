"""A frontend that asks is told soon, not too often and in the end exactly; who does not ask costs nothing."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.engine import prefix_cache_updates
from pagoda.engine.prefix_cache_updates import INTERVAL_S, MAX_KEYS, CacheReporter
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_keys import SHORT_KEY_BYTES
from pagoda.kv.block_pool import BlockPool
from pagoda.messages.frontend import PrefixCacheUpdate

A, B, C, *_ = KEYS = [bytes([index]) * 32 for index in range(12)]


def reporter(*pools: BlockPool) -> tuple[VirtualClock, CacheReporter]:
    clock = VirtualClock()
    clock.advance_to(100)
    return clock, CacheReporter(pools, clock)


def store(pool: BlockPool, *keys: bytes) -> None:
    """Tokens in blocks that may be evicted at once."""
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)


def split(packed: bytes) -> set[bytes]:
    size = SHORT_KEY_BYTES
    return {packed[start : start + size] for start in range(0, len(packed), size)}


class Frontend:
    def __init__(self) -> None:
        self.known = {b"believed before"}

    def hear(self, news: PrefixCacheUpdate) -> None:
        stored, removed = split(news.stored), split(news.removed)
        assert not stored & removed
        if news.starts_anew:
            self.known = set()
        self.known = (self.known | stored) - removed


@pytest.mark.parametrize("max_keys", [1, 3, 100])
@given(st.data())
def test_every_frontend_ends_up_knowing_what_is_cached(max_keys: int, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache_updates, "MAX_KEYS", max_keys)
        pools = [BlockPool(5), BlockPool(7)]
        clock, told = reporter(*pools)
        frontends: dict[bytes, Frontend] = {}
        for _ in range(data.draw(st.integers(0, 30))):
            action = data.draw(st.sampled_from(["store", "discard", "lose", "follow", "hear"]))
            pool = data.draw(st.sampled_from(pools))
            key = data.draw(st.sampled_from(KEYS))
            if action == "store":
                store(pool, key)
            elif action == "discard":
                pool.discard(key)
            elif action == "lose":
                pool.clear_cache()
            elif action == "follow":
                name = data.draw(st.sampled_from([b"f", b"g"]))
                told.follow(name)
                frontends.setdefault(name, Frontend())
            else:
                clock.advance_to(clock.now() + data.draw(st.sampled_from([0.0, INTERVAL_S])))
                for name, news in told.drain():
                    frontends[name].hear(news)
        while (instant := told.next_event_at()) is not None:
            clock.advance_to(max(clock.now(), instant))
            heard = told.drain()
            assert heard
            for name, news in heard:
                frontends[name].hear(news)
        keys = chain.from_iterable(pool.keys() for pool in pools)
        cached = {key[:SHORT_KEY_BYTES] for key in keys}
        assert all(frontend.known == cached for frontend in frontends.values())
        assert told.drain() == []


def test_without_a_listener_there_is_nothing_to_do() -> None:
    pool = BlockPool(4)
    _, told = reporter(pool)
    store(pool, A)
    assert pool.changed is None
    assert told.next_event_at() is None
    assert told.drain() == []


def test_the_first_news_come_at_once_and_the_next_after_the_interval() -> None:
    pool = BlockPool(4)
    clock, told = reporter(pool)
    store(pool, A)
    told.follow(b"f")
    [(frontend, first)] = told.drain()
    assert (frontend, first.stored, first.starts_anew) == (b"f", A[:8], True)
    assert told.next_event_at() is None
    store(pool, B)
    assert told.drain() == []
    assert told.next_event_at() == 100 + INTERVAL_S
    clock.advance_to(100 + INTERVAL_S)
    store(pool, C)
    [(_, second)] = told.drain()
    assert (second.stored, second.starts_anew) == (B[:8] + C[:8], False)
    clock.advance_to(200)
    assert told.drain() == []
    pool.discard(B)
    [(_, third)] = told.drain()
    assert third.removed == B[:8]


def test_one_that_comes_later_is_told_all_and_the_others_what_is_new() -> None:
    pool = BlockPool(4)
    clock, told = reporter(pool)
    told.follow(b"f")
    store(pool, A)
    told.drain()
    store(pool, B)
    told.follow(b"g")
    clock.advance_to(101)
    news = dict(told.drain())
    assert news[b"f"].stored == B[:8]
    assert split(news[b"g"].stored) == {A[:8], B[:8]}


def test_news_are_of_bounded_size() -> None:
    pool = BlockPool(MAX_KEYS + 10)
    clock, told = reporter(pool)
    store(pool, *(index.to_bytes(32, "little") for index in range(MAX_KEYS + 10)))
    told.follow(b"f")
    [(_, first)] = told.drain()
    clock.advance_to(101)
    [(_, second)] = told.drain()
    assert len(first.stored) == MAX_KEYS * SHORT_KEY_BYTES
    assert len(second.stored) == 10 * SHORT_KEY_BYTES
    assert (first.starts_anew, second.starts_anew) == (True, False)
    assert told.next_event_at() is None


def test_a_block_that_is_still_in_host_memory_is_not_removed() -> None:
    device, host = BlockPool(4), BlockPool(4)
    clock, told = reporter(device, host)
    told.follow(b"f")
    store(device, A)
    store(host, A)
    told.drain()
    device.discard(A)
    clock.advance_to(101)
    [(_, news)] = told.drain()
    assert (news.stored, news.removed) == (A[:8], b"")
    host.discard(A)
    clock.advance_to(102)
    [(_, news)] = told.drain()
    assert (news.stored, news.removed) == (b"", A[:8])
