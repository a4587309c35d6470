# SPDX-License-Identifier: Apache-2.0
"""Ranges of numbers, lists and texts in messages. A decoder refuses what lies outside, whoever has sent it.

Sums over hosts are held to the same ranges (`capped`), so that a router says nothing that another would refuse.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

MAX_COUNT = 2**53
"""The largest count, of anything: whole numbers up to this are exact as floats, in JSON too."""
MAX_ITEMS = 2**16
"""Items of a list in a message, where no other bound is said: a decoder makes an object of each."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""A size that something is divided by, or that a request must fit in."""
Place = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Number of a block, a layer, a step or another one of many."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=float(MAX_COUNT))]
Logprob = Annotated[float, msgspec.Meta(le=1.0)]
"""A log-probability, which rounding may put a little above 0; never NaN."""
Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""An id, a name or an address."""
Sentence = Annotated[str, msgspec.Meta(max_length=MAX_ITEMS)]
"""A text for people, or for a log."""

_Number = TypeVar("_Number", int, float)


def capped(number: _Number) -> _Number:
    """The number, or `MAX_COUNT` if it is larger."""
    return min(number, type(number)(MAX_COUNT))
