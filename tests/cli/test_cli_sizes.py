"""Amounts of memory, read and written."""

from __future__ import annotations

import pytest

from pagoda.cli.sizes import format_bytes, parse_bytes


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


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "2 parsecs", "1e9", "nan", "0.1"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 2GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (1_192_099_840, "1.11 GiB"),
        (24 * 2**30, "24.0 GiB"),
        (5000 * 2**30, "5000 GiB"),
    ],
)
def test_amounts_are_written(amount: int, text: str) -> None:
    assert format_bytes(amount) == text
