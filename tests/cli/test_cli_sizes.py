"""Amounts of memory, written."""

from __future__ import annotations

import pytest

from pagoda.cli.output import format_bytes


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
