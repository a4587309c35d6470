# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from counted_text import assert_linear_copies
from hypothesis import given
from hypothesis import strategies as st

from pagoda.api.parsers.json_text import JsonMender, dumped, mended

TEXTS = st.text() | st.text("\\\"'{}[]:,<`nux\n 0")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(TEXTS, parts, max_size=4),
    max_leaves=12,
)


@given(
    st.lists(VALUES) | st.dictionaries(TEXTS, VALUES),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_json_stays_as_it_is(value: object, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    mender = JsonMender()
    parts, ends = [], []
    for character in text:
        part, end = mender.push(character)
        parts.append(part)
        ends.append(end)
    assert "".join(parts) == mended(text) == text
    assert ends == [None] * (len(text) - 1) + [1]


@given(st.lists(VALUES) | st.dictionaries(TEXTS, VALUES), st.integers(0, 999))
def test_json_that_is_cut_off_stays_cut_off(value: object, at: int) -> None:
    text = json.dumps(value)
    begin = text[: at % len(text)]
    mender = JsonMender()
    part, _ = mender.push(begin)
    assert part + mender.finish(is_cut=True) == begin


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': [True, False, None,], b: 'x'}", {"a": [True, False, None], "b": "x"}),
        ('{"a": "C:\\d \\u12 \\x41 \\\' \x07"}', {"a": "C:\\d \\u12 A ' \x07"}),
        ('{"a": [1, {"b": 2', {"a": [1, {"b": 2}]}),
        ('{"a": [1}', {"a": [1]}),
        ('{"a": "x"' + " " * 90 + ',"b": "y" }', {"a": "x", "b": "y"}),
        ('{"a": "one "two", three"}', None),
        ('{"a": 1} {}', None),
        ('{"a": "', None),
        ('{"a":', None),
    ],
)
def test_what_models_write(text: str, value: object) -> None:
    found = mended(text)
    try:
        assert json.loads(found or "") == value
    except ValueError:
        assert value is None


def test_halves_of_pairs_stay_escaped() -> None:
    assert dumped({"a": "\ud83d", "b": "é"}) == '{"a": "\\ud83d", "b": "\\u00e9"}'
    with pytest.raises(ValueError, match="JSON"):
        dumped(float("nan"))


@pytest.mark.parametrize("more", ['"a', "1 ", "[", "x", " ", '" ', "\\", ", "])
def test_work_is_linear_in_the_text(more: str) -> None:
    def feed(pieces: Iterable[str]) -> None:
        mender = JsonMender()
        mender.push("[")
        for piece in pieces:
            mender.push(piece)
        mender.finish(is_cut=False)

    assert_linear_copies(feed, more * (2000 // len(more)))


@pytest.mark.timeout(60)
def test_closing_is_linear_in_what_is_open() -> None:
    depth = 100_000
    closed = mended("[" * depth + "{[}" * depth)
    assert closed == "[" * depth + ",".join(["{[]}"] * depth) + "]" * depth
