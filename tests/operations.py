# SPDX-License-Identifier: Apache-2.0
"""Counts the work of a call in operations instead of seconds: a test of growth then needs no quiet machine.

An operation is a line of Python that runs, a call or resumption of a Python function, or a call of a C function.
Counts are exact and repeatable. The inside of C functions is not counted: `value in list`, `list.pop(0)`,
`sorted()` and slices cost one operation however long the list is; to count those, count calls of `__eq__` or
`__lt__` of the elements.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

Make = Callable[[int], Callable[[], object]]


def count_operations(function: Callable[[], object]) -> int:
    """Operations of one call of `function` in this thread. Other threads, if there are any, are not counted."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if event in ("call", "line"):
            count += 1
        return trace

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        if event == "c_call":
            count += 1

    before_trace, before_profile = sys.gettrace(), sys.getprofile()
    collected = gc.isenabled()
    gc.disable()  # finalizers of earlier garbage would be counted
    try:
        sys.setprofile(profile)
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before_trace)
            sys.setprofile(before_profile)
    finally:
        if collected:
            gc.enable()
    return count


def operations_by_size(make: Make, sizes: Sequence[int]) -> list[int]:
    """Operations at each size. `make(size)` builds the input, uncounted, and returns the call to count."""
    return [count_operations(make(size)) for size in sizes]


def assert_linear(make: Make, sizes: Sequence[int], slack: float = 1.2) -> None:
    """Fails if operations grow faster than `slack` times the size: from 100 to 200 by more than 2.4 times."""
    _assert_growth(make, sizes, lambda small, large: slack * large / small)


def assert_constant(make: Make, sizes: Sequence[int], slack: float = 1.2) -> None:
    """Fails if the operations at a size are more than `slack` times those at the next smaller size."""
    _assert_growth(make, sizes, lambda _small, _large: slack)


def _assert_growth(make: Make, sizes: Sequence[int], allowed: Callable[[int, int], float]) -> None:
    counts = operations_by_size(make, sizes)
    measured = list(zip(sizes, counts, strict=True))
    for (small, few), (large, many) in itertools.pairwise(measured):
        limit = allowed(small, large)
        assert many <= limit * few, (
            f"{few} operations at size {small}, {many} at size {large}: "
            f"{many / max(few, 1):.1f} times as many, {limit:.1f} allowed"
        )
