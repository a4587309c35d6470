# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections.abc import Iterable

from counted_text import assert_linear_copies
from hypothesis import given
from hypothesis import strategies as st

from pagoda.text.stop import StopHit, StopMatcher, StopStrings

TEXT = st.text(alphabet="abcé", max_size=40)
STOPS = st.lists(st.text(alphabet="abcé", min_size=1, max_size=5), min_size=1, max_size=5)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first character that completes a stop string ends the text; the longest one counts."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, borders: list[int]) -> list[str]:
    edges = [0, *sorted(b % (len(text) + 1) for b in borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def run(deltas: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops))
    emitted = ""
    for delta in deltas:
        step = matcher.push(delta)
        if isinstance(step, StopHit):
            return emitted + step.text, step.stop
        emitted += step
    return emitted + matcher.flush(), None


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=10))
def test_equals_the_oracle_whatever_the_deltas(
    text: str, stops: list[str], borders: list[int]
) -> None:
    assert run(cut(text, borders), stops) == oracle(text, stops)


@given(TEXT, STOPS)
def test_holds_back_only_what_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    emitted = seen = ""
    for character in text:
        seen += character
        step = matcher.push(character)
        if isinstance(step, StopHit):
            return
        emitted += step
        held = seen[len(emitted) :]
        assert seen == emitted + held
        longest = max(
            (k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])), default=0
        )
        assert len(held) == longest


def test_work_is_linear_in_the_text() -> None:
    def feed(pieces: Iterable[str]) -> None:
        matcher = StopMatcher(StopStrings(["a" * 100 + "b"]))
        for piece in pieces:
            matcher.push(piece)

    assert_linear_copies(feed, "a" * 1000)
