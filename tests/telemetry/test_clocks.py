# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from fragment_files import read_fragments
from hypothesis import given
from hypothesis import strategies as st

from pagoda.telemetry.clocks import ClockComparison
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession

Ways = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=8)
"""Nanoseconds of each question on its way, and of its answer."""


class Recorder(Tracer):
    def __init__(self) -> None:
        super().__init__("worker")
        self.measured: list[tuple[str, int, int]] = []

    def clock_offset(self, peer: str, offset_ns: int, round_trip_ns: int) -> None:
        self.measured.append((peer, offset_ns, round_trip_ns))


@given(ways=Ways, ahead=st.integers(-(10**15), 10**15))
def test_the_error_is_at_most_half_of_the_shortest_round_trip(
    ways: list[tuple[int, int]], ahead: int
) -> None:
    now = 10**15
    comparison = ClockComparison(lambda: now, num_pings=len(ways))
    for there, back in ways:
        number = comparison.next_ping()
        assert number is not None
        now += there
        answer = now + ahead
        now += back
        assert comparison.pong(number, "engine", answer)
        now += 1
    assert comparison.next_ping() is None
    recorder = Recorder()
    comparison.note(recorder)
    ((peer, offset, round_trip),) = recorder.measured
    assert peer == "engine"
    assert round_trip == min(there + back for there, back in ways)
    assert abs(offset - ahead) <= round_trip / 2 + 1


def test_an_answer_to_another_question_does_not_count() -> None:
    now = 1000
    comparison = ClockComparison(lambda: now)
    assert not comparison.pong(1000, "engine", 5)
    number = comparison.next_ping()
    assert number == 1000
    assert not comparison.pong(999, "engine", 5)
    assert comparison.pong(1000, "engine", 5)
    assert not comparison.pong(1000, "engine", 5)


def test_nothing_is_written_without_an_answer(tmp_path: Path) -> None:
    tracer = Tracer("worker")
    tracer.start(TraceSession(level=TraceLevel.E2E, directory=str(tmp_path), run="r"))
    comparison = ClockComparison(tracer.clock_ns)
    comparison.next_ping()
    comparison.note(tracer)
    tracer.stop()
    (fragment,) = read_fragments(tmp_path)
    assert fragment.clocks == []
