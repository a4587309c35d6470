# SPDX-License-Identifier: Apache-2.0
"""Formats as trees, and changes of trees: values of wrong types, huge numbers, missing and doubled parts."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.chaos.fuzz.target import Form

_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 255, 256, 65_536, 10**6, 2**31 - 1, 2**31, 2**32, 2**53),
    *(2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), 0.0, -0.0, 0.5, 1e-320, 1e30, 1e308, -1e308),
    *("", "\0", "x", "/", "..", "a" * 5000, "\n", "\U0010ffff", "\x1b[31m", "{}", "[]", "0", "-1"),
    *([], {}, [[]], [0], [None], [1.5], [""], {"": None}, {"a": {}}, [[[[[[]]]]]], [0] * 600),
)
"""Values that readers have stumbled over."""
_DEPTH = 60


def _nested(rng: random.Random) -> Any:
    value: Any = rng.choice(_HOSTILE)
    for _ in range(rng.randrange(_DEPTH)):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of the tree with one to four changes."""
    tree = json.loads(json.dumps(tree)) if not _has_bytes(tree) else tree
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        tree = _changed(tree, rng)
    return tree


def _has_bytes(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_has_bytes(it) for pair in tree.items() for it in pair)
    return any(map(_has_bytes, tree)) if isinstance(tree, list) else isinstance(tree, bytes)


def _changed(tree: Any, rng: random.Random) -> Any:
    """The tree with one change at a place that is drawn on the way down."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        copy = dict(tree)
        key = rng.choice(list(copy))
        draw = rng.random()
        if draw < 0.05:
            del copy[key]
        elif draw < 0.08:
            copy[rng.choice(("", "x", f"{key}{key}", "\0"))] = copy.pop(key)
        elif draw < 0.11:
            copy[rng.choice(list(copy))] = copy[key]
        else:
            copy[key] = _changed(copy[key], rng)
        return copy
    if isinstance(tree, list) and tree and rng.random() < 0.9:
        items = list(tree)
        index, draw = rng.randrange(len(items)), rng.random()
        if draw < 0.07:
            del items[index]
        elif draw < 0.12:
            items.insert(index, items[rng.randrange(len(items))])
        elif draw < 0.14:
            items *= rng.choice((2, 10, 100)) if len(items) < 100 else 1
        else:
            items[index] = _changed(items[index], rng)
        return items
    return _other_value(tree, rng)


def _other_value(value: Any, rng: random.Random) -> Any:
    draw = rng.random()
    if isinstance(value, bool) or draw < 0.4:
        return rng.choice(_HOSTILE)
    if draw < 0.45:
        return _nested(rng)
    if isinstance(value, int):
        return rng.choice(
            (value + 1, value - 1, -value, value * 2, value * 10**6, str(value), value + 0.5)
        )
    if isinstance(value, float):
        return rng.choice(
            (-value, value * 1e300, int(value) if abs(value) < 1e18 else 0, str(value))
        )
    if isinstance(value, str | bytes) and value:
        begin, end = sorted(rng.randrange(len(value) + 1) for _ in range(2))
        return value[begin:end]
    return rng.choice(_HOSTILE)


def mutator(form: Form | None) -> Callable[[bytes, int, int], bytes]:
    """A function of an input, the largest size and a seed, that gives another input."""

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if form is not None and rng.random() < 0.8:
            try:
                changed = form.write(mutate_tree(form.read(data), rng))
            except Exception:  # whatever the format cannot hold: bytes are changed then
                changed = b""
            if changed and len(changed) <= most:
                return changed
        return _flip_bytes(bytes(data), most, rng)

    return mutate


def _flip_bytes(data: bytes, most: int, rng: random.Random) -> bytes:
    """Bytes changed, cut, doubled or put in between."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        draw = rng.randrange(5)
        if draw == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif draw == 1:
            changed[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        elif draw == 2:
            del changed[at : at + rng.choice((1, 2, 8, 64))]
        elif draw == 3:
            changed[at : at + 8] = struct.pack(
                "<Q", rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1))
            )
        else:
            changed[at:at] = changed[at : at + rng.choice((1, 16, 256))]
    return bytes(changed[:most])


def _write_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


JSON = Form(json.loads, _write_json)
MSGPACK = Form(msgspec.msgpack.decode, msgspec.msgpack.encode)

_LENGTH = struct.Struct("<Q")


def _read_safetensors(data: bytes) -> Any:
    (length,) = _LENGTH.unpack_from(data)
    return [json.loads(data[8 : 8 + length]), len(data) - 8 - length]


def _write_safetensors(tree: Any) -> bytes:
    header = json.dumps(tree[0]).encode()
    return _LENGTH.pack(len(header)) + header + bytes(min(int(tree[1]), 4096))


SAFETENSORS = Form(_read_safetensors, _write_safetensors)
