# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from operations import assert_constant

from pagoda.text.json_size import json_size

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
)


@given(VALUES)
def test_a_size_is_about_that_of_the_text(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert json_size(value, 10**9) <= 2 * len(text)
    assert json_size(value, 10**9) >= len(re.sub(r"\\u....|\\.|[-0-9a-z]", "", text)) // 2


@given(VALUES, st.integers(0, 100))
def test_a_larger_value_has_a_size_above_the_bound(value: Any, most: int) -> None:
    assert (json_size(value, most) > most) == (json_size(value, 10**9) > most)


def test_what_has_been_written_counts() -> None:
    assert json_size([msgspec.Raw(b"[1, 2]")] * 10, 1000) >= 60


def test_the_rest_of_a_value_is_not_looked_at() -> None:
    def measure(number: int) -> Callable[[], object]:
        value = [["x"] * 10 for _ in range(number)]
        return lambda: json_size(value, 1000)

    assert_constant(measure, (1000, 10_000))
