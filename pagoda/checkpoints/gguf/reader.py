# SPDX-License-Identifier: Apache-2.0
"""Reader of GGUF files: metadata and places of tensors. The bytes of tensors are not read.

The format is ggml's (docs/gguf.md in its repository): a header of keys with typed values, a table of tensors, and
aligned data. Nothing in a file is believed: a number is checked against what the file can hold before it is used.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from pagoda.checkpoints.fields import Fields
from pagoda.errors import ConfigError
from pagoda.files import open_regular

MAGIC = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)

Scalar = bool | int | float | str
Value = Scalar | Sequence["Value"]

_MAX_HEADER_BYTES = 2**27
"""Largest header that is read; the largest vocabularies take a tenth of it."""
_MAX_NESTING = 4
_MAX_DIMENSIONS = 4
_MAX_NAME_CHARS = 256
_MAX_PARTS = 999
_DEFAULT_ALIGNMENT = 32

_BARE = "_norm"
"""End of names of norms that files of Falcon-H1 and PLaMo have without `.weight`."""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_SMALLEST = {_STRING: 8, _ARRAY: 12} | {kind: form.size for kind, form in _SCALARS.items()}
"""Bytes that a value of each type takes at least."""


@dataclass(frozen=True)
class BlockType:
    """Storage of a row of a tensor: blocks of so many weights, each of so many bytes."""

    name: str
    weights: int
    num_bytes: int
    behind: int = 0
    """Bytes behind all rows of a tensor."""


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    # Of BitNet's own llama.cpp: two bits in runs of 128, as its x86 writes them, and one scale behind the tensor.
    36: BlockType("I2_S", 256, 64, behind=32),
    39: BlockType("MXFP4", 32, 17),
}
"""The types that Pagoda reads, by their numbers in the file."""
_UNREAD_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    40: "NVFP4",
}


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    """Shape as in torch: elements of the last dimension are neighbours."""
    type: BlockType
    path: Path
    start: int
    """Offset of the first byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A model in one file, or in several of which this is the first."""

    path: Path
    metadata: Fields
    tensors: Mapping[str, GgufTensor]

    def tensor(self, name: str) -> GgufTensor:
        """Raises ConfigError if there is no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self.path} lacks the tensor {name}.")
        return tensor


def is_gguf(path: Path) -> bool:
    """Returns True if the first bytes are those of a GGUF file, or the file's name says so."""
    if path.suffix == SUFFIX:
        return not path.is_dir()
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def model_name(path: Path) -> str:
    """Returns the name of a file's model: the file's name without its end and the number of the part."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem if path.suffix == SUFFIX else path.name)


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensors of a model, which other parts of a split file add to.
    Raises ConfigError: a file cannot be read or is damaged, or this is not the first part."""
    first = _read_part(path)
    metadata = first.metadata
    num_parts = metadata.count("split.count", 0)
    if num_parts <= 1:
        return first
    if num_parts > _MAX_PARTS:
        metadata.refuse("split.count", f"must be at most {_MAX_PARTS}")
    tensors = dict(first.tensors)
    for part in (_read_part(other) for other in _other_parts(path, metadata, num_parts)):
        for name, tensor in part.tensors.items():
            if tensors.setdefault(name, tensor) is not tensor:
                raise ConfigError(f"{part.path}: tensor {name} is in another part already.")
    expected = metadata.count("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        metadata.refuse("split.tensors.count", f"must be that of all parts, {len(tensors)}")
    return GgufFile(path, metadata, tensors)


def _other_parts(path: Path, metadata: Fields, num_parts: int) -> Iterator[Path]:
    """The files `name-00002-of-00003.gguf` and so on beside the first one."""
    prefix = re.sub(rf"-\d{{5}}-of-\d{{5}}\{SUFFIX}$", "", path.name)
    names = [f"{prefix}-{i:05}-of-{num_parts:05}{SUFFIX}" for i in range(1, num_parts + 1)]
    if metadata.count("split.no") != 0 or path.name != names[0]:
        raise ConfigError(
            f"{path} is one of {num_parts} parts; name the first one, {names[0]}, and keep them together."
        )
    for name in names[1:]:
        if not (path.parent / name).is_file():
            raise ConfigError(f"{path} continues in {name}, which is missing in its directory.")
        yield path.parent / name


def _read_part(path: Path) -> GgufFile:
    try:
        with open(path, "rb", opener=open_regular) as file:
            if path.stat().st_size == 0:  # of which nothing can be mapped
                raise ConfigError(f"{path} is empty, so it is no GGUF file.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).file()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


class _Reader:
    """Goes through the header once, from its beginning to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self._at = 0
        self._place = "its header"
        """Name of the part that is being read, for errors."""

    def file(self) -> GgufFile:
        self._check_version()
        num_tensors, num_keys = self._number(_U64), self._number(_U64)
        metadata = Fields(self._keys(num_keys), str(self._path))
        tensors = self._tensors(num_tensors, metadata)
        return GgufFile(self._path, metadata, tensors)

    def _check_version(self) -> None:
        if self._data[: len(MAGIC)] != MAGIC:
            self._refuse("is no GGUF file: it does not begin with 'GGUF'")
        self._at = len(MAGIC)
        version = self._number(_U32)
        if version in VERSIONS:
            return
        if version >= 2**16 and version % 2**16 == 0:
            self._refuse("is a big-endian GGUF file; Pagoda reads little-endian ones")
        known = " and ".join(map(str, VERSIONS))
        self._refuse(f"is of GGUF version {version}; Pagoda reads {known}")

    def _keys(self, count: int) -> dict[str, Value]:
        # A key takes at least its length, its type and one byte.
        self._check_room(count, 13)
        values: dict[str, Value] = {}
        for index in range(count):
            self._place = f"its metadata key {index}"
            key = self._string()
            self._place = f"the metadata key {_shown(key)}"
            if key in values:
                self._refuse(f"has {self._place} twice")
            values[key] = self._value(self._number(_U32))
        return values

    def _value(self, kind: int, nesting: int = 0) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(nesting)
        form = _SCALARS.get(kind)
        if form is None:
            self._refuse(f"gives {self._place} a value of unknown type {kind}")
        return self._number(form)

    def _array(self, nesting: int) -> list[Value]:
        if nesting == _MAX_NESTING:
            self._refuse(f"nests the arrays of {self._place} too deeply")
        kind, count = self._number(_U32), self._number(_U64)
        if kind not in _SMALLEST:
            self._refuse(f"gives {self._place} an array of unknown type {kind}")
        self._check_room(count, _SMALLEST[kind])
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array(nesting + 1) for _ in range(count)]
        form = _SCALARS[kind]
        start, self._at = self._at, self._at + count * form.size
        return list(struct.unpack_from(f"<{count}{form.format[-1]}", self._data, start))

    def _strings(self, count: int) -> list[Value]:
        """Like `_string` so many times, in a tight loop: a vocabulary has hundreds of thousands."""
        data, at, end, length_of = self._data, self._at, self._end, _U64.unpack_from
        strings: list[Value] = []
        try:
            for _ in range(count):
                (length,) = length_of(data, at)
                start, at = at + 8, at + 8 + length
                if at > end:
                    self._refuse_end()
                strings.append(data[start:at].decode())
        except struct.error:
            self._refuse_end()
        except UnicodeDecodeError:
            self._refuse(f"holds text that is not UTF-8 in {self._place}")
        self._at = at
        return strings

    def _string(self) -> str:
        [text] = self._strings(1)
        return str(text)

    def _number(self, form: struct.Struct) -> int:
        if self._at + form.size > self._end:
            self._refuse_end()
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        number: int = value
        return number

    def _tensors(self, count: int, metadata: Fields) -> dict[str, GgufTensor]:
        alignment = metadata.positive("general.alignment", _DEFAULT_ALIGNMENT)
        if alignment & (alignment - 1) or not 8 <= alignment <= 2**20:
            metadata.refuse("general.alignment", "must be a power of two from 8 on")
        self._place = "its table of tensors"
        # A tensor takes at least the length of its name, one dimension, its type and where it begins.
        self._check_room(count, 32)
        infos = [self._tensor_info(index) for index in range(count)]
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, block, offset in infos:
            if name in tensors:
                self._refuse(f"has the tensor {_shown(name)} twice")
            if offset % alignment:
                self._refuse(f"holds the tensor {_shown(name)} at no multiple of {alignment} bytes")
            num_bytes = math.prod(shape) // block.weights * block.num_bytes + block.behind
            tensors[name] = GgufTensor(
                name, shape, block, self._path, data_start + offset, num_bytes
            )
        self._check_places(tensors)
        return tensors

    def _tensor_info(self, index: int) -> tuple[str, tuple[int, ...], BlockType, int]:
        self._place = f"its tensor {index}"
        name = self._string()
        if len(name) > _MAX_NAME_CHARS:
            self._refuse(
                f"names a tensor in more than {_MAX_NAME_CHARS} characters: {_shown(name)}"
            )
        name += ".weight" if name.endswith(_BARE) else ""
        self._place = f"the tensor {_shown(name)}"
        num_dimensions = self._number(_U32)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._refuse(f"gives {self._place} {num_dimensions} dimensions")
        shape = tuple(self._number(_U64) for _ in range(num_dimensions))[::-1]
        block = self._block_type(self._number(_U32))
        if 0 in shape or shape[-1] % block.weights:
            self._refuse(
                f"gives {self._place} the shape {list(shape)}, "
                f"but {block.name} comes in rows of a multiple of {block.weights}"
            )
        return name, shape, block, self._number(_U64)

    def _block_type(self, number: int) -> BlockType:
        block = BLOCK_TYPES.get(number)
        if block is None:
            name = _UNREAD_TYPES.get(number, f"unknown type {number}")
            known = ", ".join(known.name for known in BLOCK_TYPES.values())
            self._refuse(f"stores {self._place} as {name}; Pagoda reads {known}")
        return block

    def _check_places(self, tensors: Mapping[str, GgufTensor]) -> None:
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for tensor in in_order:
            if tensor.start + tensor.num_bytes > len(self._data):
                self._refuse(
                    f"ends before the tensor {_shown(tensor.name)} does; it is incomplete, fetch it again"
                )
        for tensor, behind in pairwise(in_order):
            if tensor.start + tensor.num_bytes > behind.start:
                self._refuse(
                    f"lets the tensors {_shown(tensor.name)} and {_shown(behind.name)} overlap"
                )

    def _check_room(self, count: int, size: int) -> None:
        """Raises ConfigError unless the file has room for `count` values of at least `size` bytes each."""
        if count * size > self._end - self._at:
            self._refuse_end()

    def _refuse_end(self) -> NoReturn:
        if self._end < len(self._data):
            self._refuse(f"has more than {_MAX_HEADER_BYTES >> 20} MiB of metadata")
        self._refuse(f"ends within {self._place}; it is damaged or incomplete, fetch it again")

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self._path} {reason}.")


def _shown(name: str) -> str:
    """A name out of a file, fit for one line of a message."""
    plain = name if name.isprintable() else repr(name)
    return plain if len(plain) <= 80 else f"{plain[:80]}..."
