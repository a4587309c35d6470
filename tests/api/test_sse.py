# SPDX-License-Identifier: Apache-2.0
"""JSON of large values, encoded part by part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda.api.http import sse
from pagoda.api.http.sse import encode_in_parts, encode_json

_LEAVES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text()
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(_VALUES, st.integers(1, 4))
def test_parts_make_the_same_json(value: object, part: int) -> None:
    before, sse.PART = sse.PART, part
    try:
        assert encode_in_parts(value) == encode_json(value)
    finally:
        sse.PART = before


def test_a_long_list_is_encoded_in_slices() -> None:
    value = {"choices": [{"tokens": list(range(10_000)), "text": "a"}], "empty": [[], {}]}
    assert encode_in_parts(value) == encode_json(value)
