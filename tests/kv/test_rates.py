# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kv_tiers import end_of

from pagoda.kv.rates import DEVICE, Rate, TransferRates
from pagoda.messages.transfers import DeviceBlocks, TierBlocks, Transfer


def store(number: int, count: int) -> Transfer:
    keys = [bytes([number, index]) for index in range(count)]
    return Transfer(number, 0, DeviceBlocks(list(range(count))), TierBlocks("disk", keys))


def test_a_rate_follows_what_was_seen_lately_and_large_pieces_weigh_more() -> None:
    rate = Rate()
    assert rate.seconds(5) == 0
    rate.observe(100, 1.0)
    rate.observe(1, 1.0)
    assert 0.01 < rate.seconds(1) < 0.03
    for _ in range(60):
        rate.observe(100, 2.0)
    assert abs(rate.seconds(100) - 2.0) < 0.01


def test_what_is_queued_is_waited_for_and_counts_once() -> None:
    """The second of two transfers takes the time from the end of the first one."""
    rates = TransferRates()
    first, second = store(0, 10), store(1, 10)
    rates.begun(first, 0.0)
    rates.begun(second, 0.0)
    rates.ended(first, end_of(first), 1.0)
    assert rates.seconds(DEVICE, "disk", 10, 1.0) == 2.0
    rates.ended(second, end_of(second), 2.0)
    assert abs(rates.seconds(DEVICE, "disk", 10, 9.0) - 1.0) < 1e-9
    assert rates.seconds("disk", DEVICE, 10, 9.0) == 0.0


def test_a_tier_that_does_not_answer_gets_slower_with_time_and_failures_tell_nothing() -> None:
    rates = TransferRates()
    one = store(0, 1)
    rates.begun(one, 5.0)
    assert rates.seconds(DEVICE, "disk", 1, 12.0) == 7.0
    rates.ended(one, end_of(one, [0], "it is full"), 12.0)
    assert rates.seconds(DEVICE, "disk", 1, 30.0) == 0.0
    rates.begun(one, 40.0)
    rates.lost()
    assert rates.seconds(DEVICE, "disk", 1, 50.0) == 0.0
