# SPDX-License-Identifier: Apache-2.0
"""Whole numbers that were written with a decimal point, as programs in typed languages write them: 5.0 is 5."""

from __future__ import annotations

_EXACT = 2**53
"""Bound below which a float says exactly which whole number is meant."""


def whole_numbers(value: object) -> object:
    """A value of JSON with whole numbers in place of floats that are whole, inside of lists and objects too."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: whole_numbers(item) for name, item in value.items()}
    return value
