# SPDX-License-Identifier: Apache-2.0
"""GGUF files as trees, for the fuzzer: metadata with types, and the table of tensors."""

from __future__ import annotations

import struct
from typing import Any

from benchmarks.chaos.fuzz.target import Form

_U32, _I64, _F64, _BOOL, _STRING, _ARRAY = 4, 11, 12, 7, 8, 9
_FORMATS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.at += length
        if self.at > len(self._data):
            raise ValueError("the text is cut off")
        return self._data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if count > len(self._data):
                raise ValueError("the array is cut off")
            return [self.value(inner) for _ in range(count)]
        return self.number(_FORMATS[kind])


def _read(data: bytes) -> Any:
    source = _Bytes(data)
    source.at = 8
    num_tensors, num_keys = source.number("Q"), source.number("Q")
    metadata = {source.text(): source.value(source.number("I")) for _ in range(num_keys)}
    tensors = []
    for _ in range(num_tensors):
        name = source.text()
        shape = [source.number("Q") for _ in range(source.number("I"))]
        tensors.append([name, shape, source.number("I"), source.number("Q")])
    return {"metadata": metadata, "tensors": tensors, "rest": len(data) - source.at}


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _U32 if 0 <= value < 2**32 else _I64
    return {float: _F64, str: _STRING, list: _ARRAY}[type(value)]


def _plain(value: Any, kind: int) -> bytes:
    if kind == _STRING:
        return _text(value)
    if kind == _ARRAY:
        inner = _kind(value[0]) if value else _U32
        return struct.pack("<IQ", inner, len(value)) + b"".join(_plain(it, inner) for it in value)
    return struct.pack(f"<{_FORMATS[kind]}", value)


def _write(tree: Any) -> bytes:
    metadata, tensors = tree["metadata"], tree["tensors"]
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind = _kind(value)
        parts += [_text(key), struct.pack("<I", kind), _plain(value, kind)]
    for name, shape, block, offset in tensors:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        parts += [_text(name), sizes, struct.pack("<IQ", block, offset)]
    parts.append(bytes(min(tree["rest"], 65_536)))
    return b"".join(parts)


GGUF = Form(_read, _write)
