# SPDX-License-Identifier: Apache-2.0
"""The size of JSON values, found out in time that a bound limits."""

from __future__ import annotations

from typing import Any

import msgspec


def json_size(value: Any, most: int) -> int:
    """Characters of a value's JSON text, without its blanks and escapes. A number above `most` stands for all
    larger sizes, and is found without looking at the rest of the value."""
    size = 0
    waiting = [value]
    while waiting and size <= most:
        part = waiting.pop()
        size += 2
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, msgspec.Raw):  # JSON that has been written
            size += memoryview(part).nbytes
        elif isinstance(part, list | tuple):
            size += len(part)
            if size <= most:
                waiting.extend(part)
        elif isinstance(part, dict):
            size += 2 * len(part)
            if size <= most:
                waiting.extend(part)
                waiting.extend(part.values())
    return size
