# SPDX-License-Identifier: Apache-2.0
"""The work that `multipleOf` makes in a JSON schema: an automaton has a state for each remainder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

MAX_STEPS = 10_000
"""Least common multiple, and sum, of the steps of all `multipleOf` of a schema."""
_MAX_WHOLE = 10_000_000
"""The largest step with the zeros at its end: these cost less, but not nothing."""


def steps_of(value: object) -> int | None:
    """The steps of a `multipleOf`: its value in units of its last decimal place, without zeros at the end.
    None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value):
        return MAX_STEPS + 1
    numerator = abs(Fraction(repr(value)).numerator)
    if numerator > _MAX_WHOLE:
        return MAX_STEPS + 1
    while numerator and numerator % 10 == 0:
        numerator //= 10
    return max(1, numerator)


def takes_too_much(multiples: Sequence[int]) -> bool:
    """True if a schema with these steps is too much for an automaton."""
    return sum(multiples) > MAX_STEPS or math.lcm(*multiples) > MAX_STEPS
