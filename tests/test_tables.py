# SPDX-License-Identifier: Apache-2.0
"""A case that tries every row of a table."""

from __future__ import annotations

import pytest
from tables import each_row

TRIED: list[tuple[int, str]] = []


@each_row(("number", "text"), [(1, "a"), (2, "b")])
def test_every_row_is_tried_with_fixtures(tmp_path, number: int, text: str) -> None:
    assert tmp_path.is_dir()
    assert (number, text) in {(1, "a"), (2, "b")}
    assert (number, text) not in TRIED
    TRIED.append((number, text))


async def test_all_rows_that_fail_are_named() -> None:
    tried = []

    @each_row("number", range(4))
    async def fails(number: int) -> None:
        tried.append(number)
        assert number % 2 == 0

    with pytest.raises(ExceptionGroup, match="2 of 4 rows") as caught:
        await fails()
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["row: {'number': 1}"],
        ["row: {'number': 3}"],
    ]
    assert tried == [0, 1, 2, 3]
