# SPDX-License-Identifier: Apache-2.0
"""Messages that a lying process sends: valid ones in which one value, wherever it is, is another."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import msgspec

LIES = (
    *(-(2**63), -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1),
    *(math.nan, math.inf, -math.inf, -0.5),
    *("", "\0", "x" * 100_000, b"", b"\xff" * 7, b"\xff" * 2**20),
    *([], [0] * 100_000, [-1], [[]], {}, None, True),
)


def lies(message: object) -> Iterator[bytes]:
    """Each message that differs from `message` in one value, as msgpack; those of every length of a list too."""
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for path in _paths(whole):
        for lie in LIES:
            yield msgspec.msgpack.encode(_with(whole, path, lie))
        found = _at(whole, path)
        if isinstance(found, (list, bytes)) and found:
            for other in (found * 2, found[:-1], found[:1] * 70_000):
                yield msgspec.msgpack.encode(_with(whole, path, other))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        if key != "type":
            yield (*path, key)
            yield from _paths(inner, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(whole: Any, path: tuple[Any, ...], lie: Any) -> Any:
    changed = copy.deepcopy(whole)
    _at(changed, path[:-1])[path[-1]] = lie
    return changed
