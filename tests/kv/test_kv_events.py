"""Events tell exactly what a cache gains and loses, and enough to know which tokens each key stands for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.kv.block_keys import block_key, root_key
from pagoda.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventRecorder, Medium
from pagoda.kv.manager import BlockTable, KVManager

SIZE = 4
SALTS = (None, "tenant-a")


def recorded(num_blocks: int = 8) -> tuple[KVManager, KVEventRecorder]:
    events = KVEventRecorder(SIZE)
    return KVManager(num_blocks, SIZE, events=events), events


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


def test_what_is_found_is_not_stored_again() -> None:
    kv, events = recorded()
    first = fill(kv, list(range(9)))
    events.drain()
    second = fill(kv, [*range(8), 50, 51, 52, 53])
    assert second.blocks[:2] == first.blocks[:2]
    assert events.drain() == [BlockStored([second.keys[3]], first.keys[2], [50, 51, 52, 53], SIZE)]


def test_a_copy_of_a_stored_block_is_neither_stored_nor_removed() -> None:
    kv, events = recorded()
    tokens = list(range(8))
    tables = [kv.new_table() for _ in range(2)]
    for table in tables:
        assert kv.grow(table, 8) is not None
        kv.publish(table, tokens, 8)
    assert events.drain() == [BlockStored(tables[0].keys[1:], None, tokens, SIZE)]
    kv.free(tables[1])
    assert kv.grow(kv.new_table(), 6 * SIZE) is not None
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


def test_a_lost_device_above_a_disk_removes_what_it_held() -> None:
    events = KVEventRecorder(SIZE, has_disk=True)
    kv = KVManager(8, SIZE, events=events)
    table = fill(kv, list(range(8)))
    events.drain()
    kv.pool.clear_cache()
    assert events.drain() == [BlockRemoved(table.keys[1:])]
    kv.pool.clear_cache()
    assert events.drain() == []


def test_all_tiers_that_are_lost_with_the_workers_are_one_event() -> None:
    events = KVEventRecorder(SIZE)
    for medium in (Medium.DEVICE, Medium.HOST):
        events.lose([b"key"], medium)
    assert events.drain() == [AllBlocksCleared()]


def test_events_of_a_tier_grow_beside_those_of_another() -> None:
    events = KVEventRecorder(2)
    for index, medium in enumerate([Medium.DEVICE, Medium.HOST, Medium.DISK] * 2):
        step = index // 3
        events.store(b"%d" % step, b"0" if step else None, [step, step], medium)
    for medium in Medium:
        events.remove(b"1", medium)
    events.remove(b"0", Medium.HOST)
    stored = [BlockStored([b"0", b"1"], None, [0, 0, 1, 1], 2, medium=medium) for medium in Medium]
    removed = [
        BlockRemoved([b"1"]),
        BlockRemoved([b"1", b"0"], Medium.HOST),
        BlockRemoved([b"1"], Medium.DISK),
    ]
    assert events.drain() == [*stored, *removed]


def test_salts_have_keys_of_their_own() -> None:
    kv, events = recorded()
    fill(kv, [1, 2, 3, 4])
    fill(kv, [1, 2, 3, 4], "tenant-a")
    first, second = events.drain()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.token_ids == second.token_ids
    assert first.block_hashes != second.block_hashes


def test_without_a_prefix_cache_nothing_is_recorded() -> None:
    events = KVEventRecorder(SIZE)
    kv = KVManager(8, SIZE, prefix_caching=False, events=events)
    kv.free(fill(kv, list(range(9))))
    fill(kv, list(range(32)))
    assert events.drain() == []


class EventsMachine(RuleBasedStateMachine):
    """Requests come, grow, end and are lost with their device; events are taken now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.events = recorded(10)
        self.live: list[tuple[BlockTable, list[int], list[int]]] = []
        """(table, tokens, [computed])"""
        self.prefixes: dict[bytes, list[int]] = {}
        """The whole prefix that each key was said to stand for, of all that were ever stored."""
        self.cached: set[bytes] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), salt=st.sampled_from(SALTS))
    def start(self, tokens: list[int], salt: str | None) -> None:
        table = self.kv.new_table(salt)
        hits = self.kv.find_prefix(table, tokens)
        self.kv.adopt(table, hits)
        self.live.append((table, tokens, [len(hits) * SIZE]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        table, tokens, computed = data.draw(st.sampled_from(self.live))
        end = min(len(tokens), computed[0] + count)
        if self.kv.grow(table, end) is None:
            return
        computed[0] = end
        self.kv.publish(table, tokens, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        table, _, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.kv.free(table)

    @rule()
    def lose_the_device(self) -> None:
        for table, _, _ in self.live:
            self.kv.free(table)
        self.live.clear()
        self.kv.pool.clear_cache()

    @rule()
    def take_events(self) -> None:
        for event in self.events.drain():
            match event:
                case BlockStored():
                    self.store(event)
                case BlockRemoved():
                    assert self.cached.issuperset(event.block_hashes)
                    self.cached.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.cached.clear()
        assert self.cached == self.kv.pool.keys()

    def store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        prefix = [] if parent is None else self.prefixes[parent]
        assert len(event.token_ids) == SIZE * len(event.block_hashes)
        for index, key in enumerate(event.block_hashes):
            tokens = event.token_ids[index * SIZE : (index + 1) * SIZE]
            parents = [root_key(SIZE, salt) for salt in SALTS] if parent is None else [parent]
            assert key in [block_key(parent, tokens) for parent in parents]
            assert key not in self.cached
            self.cached.add(key)
            prefix = self.prefixes[key] = prefix + tokens
            parent = key

    @invariant()
    def books_balance(self) -> None:
        self.kv.pool.check()

    def teardown(self) -> None:
        self.take_events()


TestEventsMachine = EventsMachine.TestCase

TIERS = st.sampled_from(Medium)
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
    has_disk: bool, changes: list[tuple[str, int, Medium]]
) -> None:
    """Blocks of one chain go in and out of tiers in any order."""
    events = KVEventRecorder(1, has_disk=has_disk)
    held: set[tuple[bytes, str]] = set()
    known: set[tuple[bytes, str]] = set()
    tiers = set(Medium) if has_disk else {Medium.DEVICE, Medium.HOST}
    for change, name, medium in [*changes, ("take", 0, Medium.DEVICE)]:
        key = b"%d" % name
        if change == "take":
            apply(events, known)
            assert known == held
        elif change == "lose":
            for lost in (Medium.DEVICE, Medium.HOST):
                events.lose([key for key, tier in held if tier == lost], lost)
            held = {(key, tier) for key, tier in held if tier == Medium.DISK}
        elif medium in tiers and (key, medium) in held:
            events.remove(key, medium)
            held.remove((key, medium))
        elif medium in tiers:
            events.store(key, b"%d" % (name - 1) if name else None, [name], medium)
            held.add((key, medium))


def apply(events: KVEventRecorder, known: set[tuple[bytes, str]]) -> None:
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
