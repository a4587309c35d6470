"""The disk tier keeps its quota, and pauses when writing fails."""

from __future__ import annotations

import msgspec
import pytest
from disk_rig import EPOCH, KEYS, OTHER_KEYS, UNIT, Setup, prefix
from sim_disk import list_fan_outs

from pagoda.errors import ConfigError
from pagoda.kv.disk_scanner import OWN
from pagoda.kv.events import BlockRemoved
from pagoda.messages.transfers import KVDirectory

# ---- the quota


def test_what_was_used_longest_ago_goes_when_the_quota_is_nearly_full() -> None:
    setup = Setup(quota=20 * UNIT)
    setup.store_one_by_one(KEYS[:19])
    assert setup.report.num_blocks == 19
    setup.load(prefix(KEYS[2:]), 0, 1)
    setup.pass_through(KEYS[:1])  # both are used again
    setup.store(KEYS[19:20])
    assert setup.keeper.removed == [(OWN, [KEYS[1], KEYS[3]])]
    assert setup.tier.lookup(prefix(KEYS[:1]), 0) == 1
    assert setup.report.num_removed == 2
    setup.work()
    assert len(setup.disk) == 17 + 1
    assert setup.report.num_total_blocks == 20


def test_of_a_prefix_the_end_goes_first() -> None:
    setup = Setup(quota=20 * UNIT)
    for index in range(0, 18, 2):
        setup.store(KEYS[index : index + 2])
    setup.pass_through(KEYS[:18])
    setup.store(OTHER_KEYS[:2])
    assert setup.keeper.removed == [(OWN, [KEYS[17]])]


def test_objects_of_other_models_count_and_go_too() -> None:
    setup = Setup(quota=20 * UNIT, is_scanned=False)
    setup.keeper.disk[1] = {key: EPOCH - 5000 + 64 * n for n, key in enumerate(KEYS[:30])}
    setup.disk.update(dict.fromkeys(KEYS[:2], EPOCH - 9000))
    setup.work()
    assert not setup.keeper.removed  # 17 units
    setup.store(KEYS[4:6])
    assert not setup.keeper.removed  # 19 units
    setup.store(KEYS[6:7])
    setup.work()
    assert setup.keeper.removed == [(OWN, KEYS[:2])]
    setup.store(KEYS[7:8])
    setup.store(KEYS[8:9])
    assert setup.keeper.removed[1:] == [(1, KEYS[:4])]
    setup.work()
    assert list(setup.keeper.disk[1]) == KEYS[4:30]


def test_removals_go_on_in_parts_until_the_low_mark() -> None:
    setup = Setup(quota=10_000 * UNIT, is_scanned=False)
    keys = [number.to_bytes(32) for number in range(9_600)]
    setup.disk.update({key: EPOCH - 64 * (10_000 - n) for n, key in enumerate(keys)})
    setup.keeper.work()
    setup.tier.poll()
    assert sum(len(some) for _, some in setup.keeper.removed) == 512
    setup.work()
    assert set(setup.disk) == set(keys[1_100:])


def test_space_that_is_not_free_yet_is_not_written_to() -> None:
    setup = Setup(quota=4 * UNIT)
    setup.store_one_by_one(KEYS[:3])
    setup.pass_through(KEYS[3:5])
    setup.pass_through(KEYS[3:5])
    assert setup.begun_stores() == KEYS[3:4]
    assert len(setup.disk) == 3
    setup.pass_through(KEYS[4:5])
    assert not setup.ledger.drain()
    setup.work()
    setup.pass_through(KEYS[4:5])
    assert len(setup.disk) <= 3


def test_an_object_that_is_being_removed_is_neither_found_nor_written() -> None:
    setup = Setup()
    setup.store(KEYS[:1])
    setup.end(setup.load(prefix(), 0, 1), failed=[0])
    late = setup.keeper.scan()  # made before the removal, told after it was asked for
    setup.keeper.later(lambda: late, at=0.0)
    setup.keeper.work(1)
    setup.tier.poll()
    assert setup.tier.lookup(prefix(), 0) == 0
    setup.pass_through(KEYS[:1])
    assert not setup.ledger.drain()
    setup.work()
    setup.pass_through(KEYS[:1])
    assert setup.begun_stores() == KEYS[:1]


def test_a_listing_does_not_forget_what_was_written_after_it_was_made() -> None:
    setup = Setup()
    setup.store(KEYS[:2])
    setup.clock.advance_to(100)
    setup.store(KEYS[2:3])
    setup.keeper.later(lambda: list_fan_outs(OWN, {}, EPOCH + 50))
    setup.work()
    assert [setup.tier.lookup(prefix(), start) for start in range(3)] == [0, 0, 1]
    assert setup.report.num_blocks == 1
    assert BlockRemoved in {type(event) for event in setup.events.drain()}


def test_a_listing_brings_what_was_not_found_one_by_one() -> None:
    setup = Setup()
    setup.store(KEYS[:1])
    setup.store(KEYS[3:4])
    setup.end(setup.load(prefix(), 3, 1), failed=[0])  # it is being removed
    used_at = dict.fromkeys(KEYS[:4], EPOCH - 60)
    setup.keeper.later(lambda: list_fan_outs(OWN, used_at, 0), at=0.0)
    setup.keeper.work(1)
    setup.tier.poll()
    assert setup.report.num_blocks == 3
    assert setup.tier.lookup(prefix(), 0) == 3


def test_a_quota_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-disk-bytes 99 is too small: .* takes 100 bytes"):
        Setup(quota=99)
    setup = Setup(quota=UNIT)
    larger = [KVDirectory("/kv/larger", UNIT + 1)]
    with pytest.raises(ConfigError, match="takes 101 bytes"):
        setup.tier.workers_ready(msgspec.structs.replace(setup.ready, kv_directories=larger))


def test_a_quota_of_one_block_holds_one_block() -> None:
    setup = Setup(quota=UNIT)
    for index in range(5):
        setup.pass_through(KEYS[index : index + 1])
        setup.work()
        if index:
            setup.pass_through(KEYS[index : index + 1])  # makes room
            setup.work()
        setup.pass_through(KEYS[index : index + 1])
        for transfer in setup.ledger.drain():
            setup.end(transfer)
        assert list(setup.disk) == KEYS[index : index + 1]


# ---- stores that fail


def test_after_repeated_failures_stores_pause_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup()
    setup.pass_through(KEYS)
    for index in range(3):
        setup.pass_through(KEYS[index : index + 1])
        (transfer,) = setup.ledger.drain()
        setup.end(transfer, failed=[0], error="No space left on device")
    assert caplog.messages == [
        "KV blocks cannot be written to /kv/model-0 (No space left on device); the next try is in 10 s."
    ]
    assert setup.pass_through(KEYS[:3]) == 3
    assert not setup.ledger.drain()
    assert (setup.report.num_failed, setup.report.num_stored) == (3, 0)
    assert not setup.keeper.removed
    setup.clock.advance_to(10)
    setup.pass_through(KEYS[:3])
    (transfer,) = setup.ledger.drain()
    setup.end(transfer)
    assert setup.tier.lookup(prefix(), 0) == 3
    assert len(caplog.messages) == 1


def test_what_some_ranks_may_have_written_is_removed_when_others_could_not() -> None:
    setup = Setup(num_ranks=2)
    transfer = setup.begin_store(KEYS[:3])
    setup.end(transfer, failed=[1])
    assert setup.keeper.removed == [(OWN, KEYS[1:2])]
    assert setup.tier.lookup(prefix(), 0) == 1
