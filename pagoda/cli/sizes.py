"""Amounts of memory as people read them."""

from __future__ import annotations

import math


def format_bytes(amount: float) -> str:
    """`amount` with a binary unit and about three digits: `1.11 GiB`."""
    power = min(3, max(0, math.frexp(amount)[1] - 1) // 10)
    value = amount / 2 ** (10 * power)
    digits = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
