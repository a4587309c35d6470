# SPDX-License-Identifier: Apache-2.0
"""Protocol buffers on the wire (https://protobuf.dev/programming-guides/encoding): fields by number, nothing
more."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5
_SIZES = {_I64: 8, _I32: 4}
_MOST_VARINT_BYTES = 10
_MOST_FIELDS = 64
"""Fields of a message that has no list: millions fit into one, which would be read on an event loop."""


def fields_of(data: bytes, most: int = _MOST_FIELDS) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in their order: numbers of varints, bytes of all others. Raises ValueError: it is
    cut off, none, or has more than `most` fields."""
    at, left = 0, most
    while at < len(data):
        left -= 1
        if left < 0:
            raise ValueError(f"a message has more than {most} fields")
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _LEN:
            size, at = _varint(data, at)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise ValueError(f"a field has the wire type {kind}")
        if at + size > len(data):
            raise ValueError("a field is longer than its message")
        yield number, data[at : at + size]
        at += size


def field_of(data: bytes, number: int, most: int = _MOST_FIELDS) -> bytes:
    """The last field of this number, which has bytes; empty where there is none. Raises ValueError: as
    `fields_of`."""
    found = b""
    for name, value in fields_of(data, most):
        if name == number and isinstance(value, bytes):
            found = value
    return found


def number_of(data: bytes, number: int) -> int:
    """The last field of this number, which is a varint; 0 where there is none. Raises ValueError: as
    `fields_of`."""
    found = 0
    for name, value in fields_of(data):
        if name == number and isinstance(value, int):
            found = value
    return found


def encode(number: int, value: int | bytes | str) -> bytes:
    """One field: a varint, or bytes with their length."""
    if isinstance(value, int):
        return _encode_varint(number << 3 | _VARINT) + _encode_varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _encode_varint(number << 3 | _LEN) + _encode_varint(len(data)) + data


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_MOST_VARINT_BYTES):
        if at + index >= len(data):
            break
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("a number has no end")


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
