# SPDX-License-Identifier: Apache-2.0
"""Segments of running requests on disk: they are written, and nobody removes them while they are held."""

from __future__ import annotations

from disk_rig import KEYS, UNIT, DiskRig, prefix
from kv_tiers import cached_blocks_of

from pagoda.kv.storeys import Hold
from pagoda.messages.transfers import TierBlocks
from pagoda.plugins.disk_tier.directory import TIER


def hold(rig: DiskRig, first: int, end: int) -> Hold | None:
    return rig.tier.hold(cached_blocks_of(rig.pool, prefix(KEYS), first, end))


def test_a_block_is_written_at_once_and_held_until_it_is_let_go() -> None:
    rig = DiskRig(quota=20 * UNIT)
    first = hold(rig, 0, 12)
    assert first is not None
    assert first.place == TierBlocks(TIER, list(KEYS[:12]))
    (transfer,) = rig.ledger.drain()
    assert not first.is_there
    rig.end(transfer)
    assert first.is_there
    assert (rig.tier.num_held, rig.tier.num_holdable) == (12, 19)
    second = hold(rig, 12, 16)
    assert second is not None
    rig.end(rig.ledger.drain()[0])
    second.release()
    rig.clock.advance_to(1000)
    third = hold(rig, 16, 20)  # there is room once what nobody holds has gone
    assert third is not None
    rig.end(rig.ledger.drain()[0])
    assert hold(rig, 20, 23) is None
    rig.work()
    fourth = hold(rig, 20, 23)
    assert fourth is not None
    assert {*KEYS[:12], *KEYS[16:20]} <= rig.disk.keys()
    for it in (first, third, fourth):
        it.release()
    assert rig.tier.num_held == 0


def test_what_is_there_is_not_written_again() -> None:
    rig = DiskRig()
    rig.store(KEYS[:4])
    it = rig.tier.hold_found(KEYS[:4])
    other = hold(rig, 2, 4)
    assert other is not None
    assert it.is_there
    assert other.is_there
    assert rig.ledger.drain() == []
    assert rig.tier.num_held == 4


def test_a_disk_that_fails_again_and_again_has_no_room_and_says_why() -> None:
    rig = DiskRig()
    for _ in range(3):
        it = hold(rig, 0, 2)
        assert it is not None
        rig.end(rig.ledger.drain()[0], failed=[0, 1], error="it is full")
        assert it.error == "it is full"
        it.release()
    assert hold(rig, 0, 2) is None
    assert (rig.tier.num_holdable, rig.tier.trouble) == (0, "it is full")
    rig.clock.advance_to(11)
    assert (rig.tier.num_holdable, rig.tier.trouble) == (19, "")


def test_what_a_step_could_not_read_is_removed() -> None:
    rig = DiskRig()
    rig.store(KEYS[:4])
    held = rig.tier.hold_found(KEYS[:4])
    rig.tier.lose(KEYS[:2], hangs=False)
    rig.work()
    assert rig.disk.keys() == set(KEYS[2:4])
    assert not rig.tier.has(KEYS[0])
    assert rig.tier.has(KEYS[2])
    held.release()


def test_a_replica_holds_its_part_of_a_quota_that_several_share() -> None:
    assert DiskRig(quota=40 * UNIT, num_sharers=2).tier.num_holdable == 19
    assert DiskRig(quota=40 * UNIT).tier.num_holdable == 38


def test_a_tier_that_a_step_waited_for_in_vain_rests_and_keeps_all() -> None:
    rig = DiskRig()
    rig.store(KEYS[:4])
    held = rig.tier.hold_found(KEYS[:2])
    rig.tier.lose(KEYS[:4], hangs=True)
    held.release()
    assert (rig.tier.is_back_soon, rig.tier.next_event_at) == (True, 10.0)
    assert (rig.tier.has(KEYS[0]), rig.tier.num_holdable) == (False, 0)
    assert hold(rig, 0, 6) is None
    rig.clock.advance_to(10)
    assert (rig.tier.trouble, rig.tier.next_event_at) == ("", None)
    assert all(map(rig.tier.has, KEYS[:4]))
    assert rig.disk.keys() == set(KEYS[:4])
