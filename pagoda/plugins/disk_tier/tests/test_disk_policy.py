# SPDX-License-Identifier: Apache-2.0
"""Policies of the disk tier: admission, pauses of writing, eviction, and the quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.files import check_quota
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_keys import group_key
from pagoda.plugins.disk_tier.policy import AdmissionFilter, Silence, SwapBudget, WriteBackoff


def key(number: int) -> bytes:
    return number.to_bytes(8) + bytes(24)


# ---- admission


@pytest.mark.parametrize("min_touches", [1, 2, 3, 7])
def test_the_touch_that_was_asked_for_counts_and_all_later_ones(min_touches: int) -> None:
    counter = AdmissionFilter(min_touches)
    answers = [counter.touch(key(1)) for _ in range(10)]
    assert answers == [number >= min_touches for number in range(1, 11)]
    assert counter.touch(key(2)) == (min_touches == 1)


def test_the_last_generation_is_remembered_and_older_ones_are_not() -> None:
    counter = AdmissionFilter(2, generation=10)
    for number in range(10):
        counter.touch(key(number))
    assert counter.touch(key(0))
    for number in range(100, 120):
        counter.touch(key(number))
    assert not counter.touch(key(1))
    assert all(counter.touch(key(number)) for number in range(111, 120))


def test_a_key_that_is_touched_again_stays() -> None:
    counter = AdmissionFilter(3, generation=4)
    counter.touch(key(0))
    counter.touch(key(0))
    for number in range(1, 100):
        counter.touch(key(number))
        assert counter.touch(key(0))


def test_no_more_than_two_generations_are_kept() -> None:
    counter = AdmissionFilter(2, generation=10)
    for number in range(1000):
        counter.touch(key(number))
        assert len(counter) < 20


def chain(counter: AdmissionFilter, numbers: range, **fields: bool) -> list[bool]:
    """One request passes through blocks that follow each other."""
    return [
        counter.touch(key(number), key(number - 1) if number else None, **fields)
        for number in numbers
    ]


def test_as_much_as_has_come_back_may_follow_it() -> None:
    counter = AdmissionFilter(2)
    assert chain(counter, range(3)) == [False] * 3
    assert chain(counter, range(9)) == [True] * 6 + [False] * 3
    assert chain(counter, range(9)) == [True] * 9


def test_what_is_kept_has_come_back_whatever_is_remembered() -> None:
    counter = AdmissionFilter(3)
    chain(counter, range(4), is_kept=True)
    assert chain(counter, range(4, 10)) == [True] * 4 + [False] * 2


def test_little_that_is_shared_does_not_draw_much_after_it() -> None:
    counter = AdmissionFilter(2)
    chain(counter, range(2))
    for request in range(100, 1000, 100):
        assert chain(counter, range(2)) == [True] * 2
        own = [key(number) for number in range(request, request + 50)]
        parents = [key(1), *own[:-1]]
        written = [counter.touch(one, parent) for one, parent in zip(own, parents, strict=True)]
        assert written == [True] * 2 + [False] * 48


def test_a_block_of_another_group_is_worth_as_much_as_that_of_group_0() -> None:
    counter = AdmissionFilter(2)
    chain(counter, range(3))
    tail = [group_key(key(number), 1) for number in range(6)]
    assert not counter.touch(tail[2], tail[1], 1)
    assert not counter.touch(tail[2], tail[1], 1)
    chain(counter, range(6))
    assert [counter.touch(one, None, 1) for one in tail[2:]] == [True] * 4
    chain(counter, range(9))
    assert not counter.touch(group_key(key(11), 1), None, 1)


def test_groups_that_group_0_is_not_offered_with_count_by_themselves() -> None:
    counter = AdmissionFilter(2)
    answers = [counter.touch(group_key(key(1), group), None, group) for group in (1, 2, 3, 1, 2)]
    assert answers == [False, False, False, True, True]


# ---- pauses


def test_the_third_failure_in_a_row_begins_a_pause_of_which_is_told() -> None:
    pause = WriteBackoff(VirtualClock())
    assert [pause.failed(), pause.failed()] == [None, None]
    assert not pause.is_on
    assert pause.failed() == 10
    assert pause.is_on


def test_a_success_between_failures_starts_the_count_anew() -> None:
    pause = WriteBackoff(VirtualClock())
    for _ in range(5):
        assert pause.failed() is None
        assert pause.failed() is None
        assert not pause.succeeded()
    assert not pause.is_on


def test_pauses_grow_while_stores_fail_and_nothing_is_told_again() -> None:
    clock = VirtualClock()
    pause = WriteBackoff(clock)
    for _ in range(3):
        pause.failed()
    lengths = []
    for _ in range(8):
        begun = clock.now()
        while pause.is_on:
            assert pause.failed() is None  # what was under way when it began
            clock.advance_to(clock.now() + 5)
        lengths.append(clock.now() - begun)
        assert pause.failed() is None
    assert lengths == [10, 20, 40, 80, 160, 300, 300, 300]
    assert pause.succeeded()
    assert not pause.is_on
    assert [pause.failed(), pause.failed(), pause.failed()] == [None, None, 10]


# ---- the quota


def test_a_quota_may_be_as_large_as_the_file_system(tmp_path: Path) -> None:
    file_system = os.statvfs(tmp_path)
    size = file_system.f_frsize * file_system.f_blocks
    check_quota(tmp_path, size, "--kv-disk-bytes")
    check_quota(tmp_path / "not" / "there" / "yet", size, "--kv-disk-bytes")
    sentence = rf"^--kv-disk-bytes \d+\.\d GiB is more than the \d+\.\d GiB of the file system of {tmp_path}/a; "
    with pytest.raises(ConfigError, match=sentence):
        check_quota(tmp_path / "a", size + 1, "--kv-disk-bytes")


# ---- the budget of swap


def test_swap_writes_what_the_quota_holds_and_as_much_again_each_hour() -> None:
    clock = VirtualClock()
    budget = SwapBudget(10, clock)
    assert [budget.take(7), budget.take(7), budget.take(7)] == [7, 3, 0]
    clock.advance_to(720.0)
    assert budget.take(7) == 2
    clock.advance_to(1e6)
    assert budget.take(100) == 10


# ---- silence


@pytest.mark.parametrize("start", [0.0, 0.5, 4.1])
def test_silence_is_long_at_the_time_that_it_named(start: float) -> None:
    clock = VirtualClock()
    clock.advance_to(start)
    silence = Silence(clock, 60.0)
    silence.asked()
    assert not silence.is_long
    at = silence.is_long_at
    assert at is not None
    clock.advance_to(at)
    assert silence.is_long
    assert silence.is_long_at is None
    silence.heard(owes_more=False)
    assert not silence.is_long
