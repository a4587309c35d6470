"""After some failures nothing is stored for a while, and for longer each time."""

from __future__ import annotations

from pagoda.ipc.clock import VirtualClock
from pagoda.kv.write_backoff import WriteBackoff


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
