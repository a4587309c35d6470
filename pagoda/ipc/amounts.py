# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory as people write them."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_AMOUNT = re.compile(r"(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """The number of bytes that `text` says: `2GiB`, `512MB`, `1073741824`.

    Raises ValueError, which says what would be right, if `text` is not an amount above zero that fits in 64 bits.
    """
    match = _AMOUNT.fullmatch(text.strip())
    unit = _UNITS.get(match.group(2).lower()) if match else None
    amount = math.floor(float(match.group(1)) * unit) if match and unit else 0
    if not 1 <= amount < 2**63:
        raise ValueError("takes an amount of memory such as 2GiB, 512MB or 1073741824")
    return amount
