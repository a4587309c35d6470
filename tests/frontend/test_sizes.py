"""Amounts of memory, read."""

from __future__ import annotations

import pytest

from pagoda.frontend.engine_options import parse_bytes


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5G", 3 * 2**29),
        ("512MB", 512_000_000),
        ("4096", 4096),
        ("1k", 1024),
    ],
)
def test_amounts_are_read(text: str, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", "2 parsecs", "1e9", "nan", "0.1", "8388608TiB"]
)
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 2GiB"):
        parse_bytes(text)
