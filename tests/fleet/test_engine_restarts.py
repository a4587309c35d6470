# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from pagoda.errors import EngineDeadError
from pagoda.fleet.engine_restarts import (
    FREE_LOSSES,
    MAX_DEATHS_IN_ROW,
    MAX_LOSSES,
    WINDOW_S,
    EngineRestarts,
)
from pagoda.ipc.clock import VirtualClock


def test_engines_in_a_row_that_were_no_good_wait_longer_and_longer_then_none_follows() -> None:
    restarts = EngineRestarts(VirtualClock())
    pauses = [restarts.on_loss("died", was_good=False) for _ in range(MAX_DEATHS_IN_ROW)]
    assert pauses == [0, 0.5, 1, 2, 4]
    with pytest.raises(EngineDeadError, match=r"^The engine died, 6 times in a row\.$"):
        restarts.on_loss("died", was_good=False)


def test_a_good_engine_begins_the_row_anew() -> None:
    restarts = EngineRestarts(VirtualClock())
    for _ in range(2):
        for _ in range(MAX_DEATHS_IN_ROW - 1):
            restarts.on_loss("died", was_good=False)
        assert restarts.on_loss("died", was_good=True) == 0
        assert restarts.num_in_row == 1


def test_engines_that_are_killed_twenty_times_within_minutes_start_at_once() -> None:
    clock = VirtualClock()
    restarts = EngineRestarts(clock)
    for _ in range(20):
        clock.advance_to(clock.now() + 5)
        assert restarts.on_loss("was killed by SIGKILL", was_good=True) == 0


def test_engines_that_give_a_token_and_die_wait_longer_and_longer_then_none_follows() -> None:
    clock = VirtualClock()
    restarts = EngineRestarts(clock)
    pauses = []
    for _ in range(MAX_LOSSES):
        clock.advance_to(clock.now() + 3)
        pauses.append(restarts.on_loss("died", was_good=True))
        clock.advance_to(clock.now() + pauses[-1])
    assert pauses[:FREE_LOSSES] == [0] * FREE_LOSSES
    assert pauses[FREE_LOSSES:] == sorted(pauses[FREE_LOSSES:])
    assert (pauses[FREE_LOSSES], pauses[-1]) == (0.5, 16)
    with pytest.raises(EngineDeadError, match=r"died; 101 engines were lost within an hour\.$"):
        restarts.on_loss("died", was_good=True)
    assert clock.now() < WINDOW_S


def test_losses_of_long_ago_are_forgotten() -> None:
    clock = VirtualClock()
    restarts = EngineRestarts(clock)
    for _ in range(3 * MAX_LOSSES):
        clock.advance_to(clock.now() + WINDOW_S / FREE_LOSSES + 1)
        assert restarts.on_loss("died", was_good=True) == 0
