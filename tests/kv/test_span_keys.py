# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks in which embedded spans lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda.kv.block_keys import block_key, prefix_keys, root_key
from pagoda.messages.spans import EmbeddedSpan, embedded_span

TOKENS = list(range(33))
SIZE = 4


def _keys(*spans: EmbeddedSpan) -> list[bytes]:
    return prefix_keys(TOKENS, SIZE, None, 100, "", spans)


def test_keys_of_tokens_alone_are_as_before() -> None:
    assert _keys()[-1].hex() == "bc576950752010cad7308f51cff63b8cda4d77a5ab5fefaff773a4cb9519a2de"
    assert block_key(root_key(SIZE), TOKENS[:4]) == _keys()[0]


def test_keys_differ_from_the_block_on_in_which_a_span_begins() -> None:
    plain, one = _keys(), _keys(embedded_span(9, 6, b"abcd" * 6))
    assert one[:2] == plain[:2]
    assert not set(one[2:]) & set(plain[2:])
    other = _keys(embedded_span(9, 6, b"abce" * 6))
    assert other[:2] == one[:2]
    assert not set(other[2:]) & set(one[2:])
    moved = _keys(embedded_span(10, 6, b"abcd" * 6))
    assert not set(moved[2:]) & set(one[2:])


def test_a_later_span_does_not_change_keys_before_it() -> None:
    first, second = embedded_span(1, 5, b"abcd" * 5), embedded_span(20, 3, b"abcd" * 3)
    both = _keys(first, second)
    assert both[:5] == _keys(first)[:5]
    assert both[5:] != _keys(first)[5:]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=5
    )  # places before a span, and its length
)
def test_keys_block_by_block_are_those_of_the_whole(parts: list[tuple[int, int]]) -> None:
    spans, at = [], 0
    for gap, length in parts:
        spans.append(embedded_span(at + gap, length, bytes([length]) * 4 * length))
        at += gap + length
    parent, keys = root_key(SIZE), []
    for start in range(0, 32, SIZE):
        parent = block_key(parent, TOKENS[start : start + SIZE], spans, start)
        keys.append(parent)
    assert keys == _keys(*spans)
