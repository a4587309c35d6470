# SPDX-License-Identifier: Apache-2.0
"""The disk tier keeps its quota, and pauses when writing fails."""

from __future__ import annotations

import msgspec
import pytest
from disk_rig import EPOCH, KEYS, OTHER_KEYS, UNIT, DiskRig, prefix

from benchmarks.simulation.disk import list_fan_outs
from pagoda.errors import ConfigError
from pagoda.kv.events import BlockRemoved
from pagoda.messages.transfers import TierPlace
from pagoda.plugins.disk_tier.scanner import OWN

# ---- the quota


def test_what_was_used_longest_ago_goes_when_the_quota_is_nearly_full() -> None:
    rig = DiskRig(quota=20 * UNIT)
    rig.store_one_by_one(KEYS[:19])
    assert rig.report.num_blocks == 19
    rig.load(prefix(KEYS[2:]), 0, 1)
    rig.pass_through(KEYS[:1])  # both are used again
    rig.store(KEYS[19:20])
    assert rig.keeper.removed == [(OWN, [KEYS[1], KEYS[3]])]
    assert rig.tier.lookup(prefix(KEYS[:1]), 0) == 1
    assert rig.report.num_removed == 2
    rig.work()
    assert len(rig.disk) == 17 + 1
    assert rig.report.num_total_blocks == 20


def test_of_a_prefix_the_end_goes_first() -> None:
    rig = DiskRig(quota=20 * UNIT)
    for index in range(0, 18, 2):
        rig.store(KEYS[index : index + 2])
    rig.pass_through(KEYS[:18])
    rig.store(OTHER_KEYS[:2])
    assert rig.keeper.removed == [(OWN, [KEYS[17]])]


def test_objects_of_other_models_count_and_go_too() -> None:
    rig = DiskRig(quota=20 * UNIT, is_scanned=False)
    rig.keeper.disk[1] = {key: EPOCH - 5000 + 64 * n for n, key in enumerate(KEYS[:30])}
    rig.disk.update(dict.fromkeys(KEYS[:2], EPOCH - 9000))
    rig.work()
    assert not rig.keeper.removed  # 17 units
    rig.store(KEYS[4:6])
    assert not rig.keeper.removed  # 19 units
    rig.store(KEYS[6:7])
    rig.work()
    assert rig.keeper.removed == [(OWN, KEYS[:2])]
    rig.store(KEYS[7:8])
    rig.store(KEYS[8:9])
    assert rig.keeper.removed[1:] == [(1, KEYS[:4])]
    rig.work()
    assert list(rig.keeper.disk[1]) == KEYS[4:30]


def test_removals_go_on_in_parts_until_the_low_mark() -> None:
    rig = DiskRig(quota=10_000 * UNIT, is_scanned=False)
    keys = [number.to_bytes(32) for number in range(9_600)]
    rig.disk.update({key: EPOCH - 64 * (10_000 - n) for n, key in enumerate(keys)})
    rig.keeper.work()
    rig.tier.poll()
    assert sum(len(some) for _, some in rig.keeper.removed) == 512
    rig.work()
    assert set(rig.disk) == set(keys[1_100:])


def test_space_that_is_not_free_yet_is_not_written_to() -> None:
    rig = DiskRig(quota=4 * UNIT)
    rig.store_one_by_one(KEYS[:3])
    rig.pass_through(KEYS[3:5])
    rig.pass_through(KEYS[3:5])
    assert rig.begun_stores() == KEYS[3:4]
    assert len(rig.disk) == 3
    rig.pass_through(KEYS[4:5])
    assert not rig.ledger.drain()
    rig.work()
    rig.pass_through(KEYS[4:5])
    assert len(rig.disk) <= 3


def test_an_object_that_is_being_removed_is_neither_found_nor_written(rig: DiskRig) -> None:
    rig.store(KEYS[:1])
    rig.end(rig.load(prefix(), 0, 1), failed=[0])
    late = rig.keeper.scan()  # made before the removal, told after it was asked for
    rig.keeper.later(lambda: late, at=0.0)
    rig.keeper.work(1)
    rig.tier.poll()
    assert rig.tier.lookup(prefix(), 0) == 0
    rig.pass_through(KEYS[:1])
    assert not rig.ledger.drain()
    rig.work()
    rig.pass_through(KEYS[:1])
    assert rig.begun_stores() == KEYS[:1]


def test_a_listing_does_not_forget_what_was_written_after_it_was_made(rig: DiskRig) -> None:
    rig.store(KEYS[:2])
    rig.clock.advance_to(100)
    rig.store(KEYS[2:3])
    rig.keeper.later(lambda: list_fan_outs(OWN, {}, EPOCH + 50))
    rig.work()
    assert [rig.tier.lookup(prefix(), start) for start in range(3)] == [0, 0, 1]
    assert rig.report.num_blocks == 1
    assert BlockRemoved in {type(event) for event in rig.events.drain()}


def test_a_listing_brings_what_was_not_found_one_by_one(rig: DiskRig) -> None:
    rig.store(KEYS[:1])
    rig.store(KEYS[3:4])
    rig.end(rig.load(prefix(), 3, 1), failed=[0])  # it is being removed
    used_at = dict.fromkeys(KEYS[:4], EPOCH - 60)
    rig.keeper.later(lambda: list_fan_outs(OWN, used_at, 0), at=0.0)
    rig.keeper.work(1)
    rig.tier.poll()
    assert rig.report.num_blocks == 3
    assert rig.tier.lookup(prefix(), 0) == 3


def test_a_quota_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-disk-bytes 99 is too small: .* takes 100 bytes"):
        DiskRig(quota=99)
    rig = DiskRig(quota=UNIT)
    larger = [TierPlace("disk", "/kv/larger", UNIT + 1)]
    with pytest.raises(ConfigError, match="takes 101 bytes"):
        rig.tier.workers_ready(msgspec.structs.replace(rig.ready, kv_places=larger))


def test_a_directory_of_several_ranks_on_one_host_counts_once() -> None:
    rig = DiskRig(quota=20 * UNIT)
    here, there = (TierPlace("disk", "/kv/model", UNIT, host) for host in ("here", "there"))
    rig.tier.workers_ready(msgspec.structs.replace(rig.ready, kv_places=(here, here)))
    assert rig.report.num_total_blocks == 20
    with pytest.raises(ConfigError, match="needs all ranks of --context-parallel-size, or of"):
        rig.tier.workers_ready(msgspec.structs.replace(rig.ready, kv_places=(here, there)))


def test_a_quota_of_one_block_holds_one_block() -> None:
    rig = DiskRig(quota=UNIT)
    for index in range(5):
        rig.pass_through(KEYS[index : index + 1])
        rig.work()
        if index:
            rig.pass_through(KEYS[index : index + 1])  # makes room
            rig.work()
        rig.pass_through(KEYS[index : index + 1])
        for transfer in rig.ledger.drain():
            rig.end(transfer)
        assert list(rig.disk) == KEYS[index : index + 1]


# ---- stores that fail


def test_after_repeated_failures_stores_pause_with_one_warning(
    rig: DiskRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.pass_through(KEYS)
    for index in range(3):
        rig.pass_through(KEYS[index : index + 1])
        (transfer,) = rig.ledger.drain()
        rig.end(transfer, failed=[0], error="No space left on device")
    assert caplog.messages == [
        "KV blocks cannot be written to /kv/model-0 (No space left on device); the next try is in 10 s."
    ]
    assert rig.pass_through(KEYS[:3]) == 3
    assert not rig.ledger.drain()
    assert (rig.report.num_failed, rig.report.num_stored) == (3, 0)
    assert not rig.keeper.removed
    rig.clock.advance_to(10)
    rig.pass_through(KEYS[:3])
    (transfer,) = rig.ledger.drain()
    rig.end(transfer)
    assert rig.tier.lookup(prefix(), 0) == 3
    assert len(caplog.messages) == 1


def test_what_some_ranks_may_have_written_is_removed_when_others_could_not() -> None:
    rig = DiskRig(num_ranks=2)
    transfer = rig.begin_store(KEYS[:3])
    rig.end(transfer, failed=[1])
    assert rig.keeper.removed == [(OWN, KEYS[1:2])]
    assert rig.tier.lookup(prefix(), 0) == 1
