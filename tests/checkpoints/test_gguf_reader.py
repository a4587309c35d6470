# SPDX-License-Identifier: Apache-2.0
"""GGUF files as the `gguf` package writes them, and what is said of damaged ones."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf_files import finish
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import assert_linear, count_operations

from pagoda.checkpoints.gguf.reader import BLOCK_TYPES, is_gguf, model_name, read_gguf
from pagoda.errors import ConfigError

TENSORS = {
    "norm": np.arange(5, dtype=np.float32),
    "matrix": np.arange(6, dtype=np.float16).reshape(2, 3),
    "packed": np.ones((4, 64), dtype=np.float32),
}


def write(path: Path, *, alignment: int = 32, split: dict[str, int] | None = None) -> bytes:
    """A small file with every type of value."""
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for kind, value in SCALARS.items():
        writer.add_key_value(f"x.{kind.name}", value, kind)
    writer.add_array("x.texts", ["", "ä", "two words"])
    writer.add_array("x.numbers", [1.5, -2.0])
    writer.add_array("x.integers", [3, -4])
    for key, value in (split or {}).items():
        writer.add_key_value(key, value, GGUFValueType.UINT16)
    writer.add_tensor("norm", TENSORS["norm"])
    writer.add_tensor("matrix", TENSORS["matrix"])
    packed = gguf.quantize(TENSORS["packed"], GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    finish(writer)
    return path.read_bytes()


SCALARS: dict[GGUFValueType, Any] = {
    GGUFValueType.UINT8: 200,
    GGUFValueType.INT8: -100,
    GGUFValueType.UINT16: 60_000,
    GGUFValueType.INT16: -30_000,
    GGUFValueType.UINT32: 2**32 - 1,
    GGUFValueType.INT32: -(2**31),
    GGUFValueType.FLOAT32: 0.5,
    GGUFValueType.BOOL: True,
    GGUFValueType.STRING: "ein Größe",
    GGUFValueType.UINT64: 2**64 - 1,
    GGUFValueType.INT64: -(2**63),
    GGUFValueType.FLOAT64: 1e300,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.gguf"


@pytest.mark.parametrize("alignment", [8, 32, 4096])
@pytest.mark.parametrize("version", [2, 3])
def test_what_the_writer_wrote_is_read(path: Path, alignment: int, version: int) -> None:
    data = bytearray(write(path, alignment=alignment))
    data[4:8] = struct.pack("<I", version)
    path.write_bytes(data)
    file = read_gguf(path)
    metadata = file.metadata
    assert metadata.text("general.architecture") == "llama"
    assert metadata.text("x.STRING") == "ein Größe"
    assert metadata.flag("x.BOOL", False) is True
    for kind in (GGUFValueType.FLOAT32, GGUFValueType.FLOAT64):
        assert metadata.number(f"x.{kind.name}") == SCALARS[kind]
    for kind, value in SCALARS.items():
        if "INT" in kind.name:
            assert metadata.amount(f"x.{kind.name}") == value
    assert metadata.texts("x.texts") == ["", "ä", "two words"]
    assert metadata.numbers("x.numbers") == [1.5, -2.0]
    assert metadata.integers("x.integers") == [3, -4]

    by_oracle = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert list(file.tensors) == list(by_oracle)
    for name, tensor in file.tensors.items():
        oracle = by_oracle[name]
        assert tensor.shape == TENSORS[name].shape
        assert tensor.type.name == oracle.tensor_type.name
        assert (tensor.start, tensor.num_bytes) == (oracle.data_offset, oracle.n_bytes)
        assert data[tensor.start :][: tensor.num_bytes] == oracle.data.tobytes()


def test_sizes_of_blocks_are_those_of_the_package() -> None:
    for number, block in BLOCK_TYPES.items():
        if block.name == "I2_S":  # of BitNet's own llama.cpp
            continue
        kind = GGMLQuantizationType(number)
        assert (block.name, (block.weights, block.num_bytes)) == (
            kind.name,
            gguf.GGML_QUANT_SIZES[kind],
        )


def test_a_file_is_known_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    write(tmp_path / "no-suffix")
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text").write_text("GG")
    (tmp_path / "directory.gguf").mkdir()
    assert is_gguf(tmp_path / "no-suffix")
    assert is_gguf(tmp_path / "empty.gguf")
    assert not is_gguf(tmp_path / "text")
    assert not is_gguf(tmp_path / "directory.gguf")
    assert not is_gguf(tmp_path)
    assert model_name(Path("a/Qwen3-0.6B-Q8_0.gguf")) == "Qwen3-0.6B-Q8_0"
    assert model_name(Path("a/big-00001-of-00003.gguf")) == "big"
    assert model_name(Path("a/sha256-1.5")) == "sha256-1.5"


def test_each_entry_of_a_vocabulary_costs_a_few_operations(path: Path) -> None:
    def reading(size: int) -> Callable[[], object]:
        writer = GGUFWriter(path, "llama")
        writer.add_array("tokens", [f"token{i}" for i in range(size)])
        writer.add_array("merges", [f"left{i} right{i}" for i in range(size)])
        writer.add_array("types", [1] * size)
        finish(writer)
        return lambda: read_gguf(path).metadata.texts("merges")

    assert_linear(reading, (1000, 2000))
    assert count_operations(reading(2000)) < 20 * 2000
    assert read_gguf(path).metadata.texts("merges")[-1] == "left1999 right1999"


# ---- files in parts


def _write_parts(directory: Path, count: int) -> list[Path]:
    """The tensors of the first part are `part0.a`, `part0.b` and so on."""
    paths = [directory / f"big-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    for number, path in enumerate(paths):
        writer = GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", 2 * count)
        for letter in "ab":
            writer.add_tensor(f"part{number}.{letter}", np.full(3, number, dtype=np.float32))
        finish(writer)
    return paths


def test_parts_are_one_model(tmp_path: Path) -> None:
    paths = _write_parts(tmp_path, 3)
    file = read_gguf(paths[0])
    assert {tensor.name: tensor.path for tensor in file.tensors.values()} == {
        f"part{number}.{letter}": paths[number] for number in range(3) for letter in "ab"
    }


def test_parts_that_do_not_fit_together(tmp_path: Path) -> None:
    paths = _write_parts(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"name the first one, big-00001-of-00003\.gguf"):
        read_gguf(paths[1])
    paths[2].unlink()
    with pytest.raises(
        ConfigError, match=r"continues in big-00003-of-00003\.gguf, which is missing"
    ):
        read_gguf(paths[0])
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ConfigError, match=r"tensor part1\.a is in another part already"):
        read_gguf(paths[0])
    write(paths[2])
    with pytest.raises(ConfigError, match=r"split\.tensors\.count must be that of all parts, 7"):
        read_gguf(paths[0])
    paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ConfigError, match="is one of 3 parts"):
        read_gguf(tmp_path / "renamed.gguf")


# ---- damaged files


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _string(name) + struct.pack("<I", kind) + value


def _info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return _string(name) + shape + struct.pack("<IQ", kind, offset)


def _file(
    keys: list[bytes], infos: list[bytes], data: bytes = b"", counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_keys = counts or (len(infos), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(keys + infos)
    return head + bytes(-len(head) % 32) + data


def _array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


HUGE = 2**63 - 1
LONG = struct.pack("<Q", HUGE)
DAMAGED = [
    (b"", "is empty, so it is no GGUF file"),
    (b"PK\x03\x04" * 9, "is no GGUF file: it does not begin with 'GGUF'"),
    (b"GGUF\x01\0\0\0" + bytes(16), "is of GGUF version 1; Pagoda reads 2 and 3"),
    (b"GGUF\0\0\0\x03" + bytes(16), "is a big-endian GGUF file"),
    (b"GGUF\x03\0\0\0", "ends within its header"),
    (_file([], [], counts=(0, HUGE)), "ends within its header"),
    (_file([], [], counts=(HUGE, 0)), "ends within its table of tensors"),
    (_file([LONG + bytes(9)], []), "ends within its metadata key 0"),
    (_file([_key("a", 0, b"\1")] * 2, []), "has the metadata key a twice"),
]
WRONG_VALUES = [
    (8, LONG, "ends within the metadata key a"),
    (9, _array(0, HUGE), "ends within the metadata key a"),
    (9, _array(8, 20), "ends within the metadata key a"),
    (9, _array(9, 1) * 6 + _array(0, 0), "nests the arrays of the metadata key a too deeply"),
    (13, bytes(8), "key a a value of unknown type 13"),
    (9, _array(99, 0), "key a an array of unknown type 99"),
    (8, _string(b"\xff"), "text that is not UTF-8 in the metadata key a"),
]
"""Type and value of a key."""
WRONG_TENSORS: list[tuple[list[tuple[list[int], int, int]], str]] = [
    ([([32], 77, 0)], "stores the tensor t as unknown type 77; Pagoda reads F32, F16, Q4_0"),
    ([([256], 40, 0)], "stores the tensor t as NVFP4; Pagoda reads F32"),
    ([([1] * 5, 0, 0)], "gives the tensor t 5 dimensions"),
    ([([32, 0], 0, 0)], "the tensor t the shape [0, 32]"),
    ([([33], 8, 0)], "tensor t the shape [33], but Q8_0 comes in rows of a multiple of 32"),
    ([([2], 0, 8)], "holds the tensor t at no multiple of 32 bytes"),
    ([([17], 0, 0)], "ends before the tensor t does"),
    ([([HUGE, HUGE], 0, 2**64 - 32)], "ends before the tensor t does"),
    ([([16], 0, 0), ([4], 0, 32)], "lets the tensors t and u overlap"),
]
"""Dimensions, type and place of each tensor, in 64 bytes of data."""
DAMAGED += [(_file([_key("a", *value)], [], bytes(39)), text) for *value, text in WRONG_VALUES]
DAMAGED += [
    (
        _file([], [_info(name, *info) for name, info in zip("tu", infos, strict=False)], bytes(64)),
        text,
    )
    for infos, text in WRONG_TENSORS
]
DAMAGED += [
    (
        _file([_key("general.alignment", 4, b"\x18\0\0\0")], []),
        "general.alignment must be a power of two from 8 on, got 24",
    ),
    (_file([], [_info("t", [4], 0, 0)] * 2, bytes(64)), "has the tensor t twice"),
]


@pytest.mark.parametrize(("data", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_a_damaged_file_is_one_sentence(data: bytes, message: str, path: Path) -> None:
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_gguf(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert message in text
    assert text.endswith(".")
    assert "\n" not in text


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.gguf cannot be read: No such file"):
        read_gguf(tmp_path / "missing.gguf")
    with pytest.raises(ConfigError, match="cannot be read: it is not a regular file"):
        read_gguf(tmp_path)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda m: m.text("x.UINT8"), "x.UINT8 must be a string, got 200."),
        (lambda m: m.text("none"), "lacks none, a string."),
        (lambda m: m.flag("x.UINT8", True), "x.UINT8 must be true or false, got 200."),
        (lambda m: m.count("x.BOOL"), "x.BOOL must be a whole number, got True."),
        (lambda m: m.count("x.INT8"), "x.INT8 must not be negative, got -100."),
        (lambda m: m.positive("none", 0), "none must be a positive integer, got None."),
        (lambda m: m.number("x.INT8"), "x.INT8 must be a positive number, got -100."),
        (lambda m: m.amount("x.BOOL"), "x.BOOL must be a number, got True."),
        (lambda m: m.texts("x.numbers"), "x.numbers must be a list of strings, got [1.5, -2.0]."),
        (lambda m: m.integers("none"), "lacks none, a list of whole numbers."),
    ],
)
def test_a_wrong_value_names_its_key(
    read: Callable[[Any], object], message: str, path: Path
) -> None:
    write(path)
    with pytest.raises(ConfigError) as caught:
        read(read_gguf(path).metadata)
    assert str(caught.value).endswith(message)


def test_no_beginning_of_a_file_is_taken_for_a_whole_one(path: Path) -> None:
    data = write(path)
    for length in range(len(data) - 34):  # the padding of the last tensor may be absent
        path.write_bytes(data[:length])
        with pytest.raises(ConfigError):
            read_gguf(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file and what it should hold."""
    path = tmp_path_factory.mktemp("flipped") / "f.gguf"
    return path, write(path)


@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 8))
def test_flipped_bytes_are_refused_or_read(
    seed: int, flips: int, whole: tuple[Path, bytes]
) -> None:
    rng = random.Random(seed)
    path, data = whole[0], bytearray(whole[1])
    for _ in range(flips):
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
    path.write_bytes(data)
    try:
        file = read_gguf(path)
    except ConfigError as error:
        assert str(error).startswith(str(path))  # noqa: PT017 - either is right
    else:
        for tensor in file.tensors.values():
            assert tensor.start + tensor.num_bytes <= len(data)
            num_blocks = (tensor.num_bytes - tensor.type.behind) // tensor.type.num_bytes
            weights = num_blocks * tensor.type.weights
            assert math.prod(tensor.shape) == weights


def test_neither_torch_nor_numpy_is_needed() -> None:
    code = (
        "import sys, pagoda.checkpoints.gguf.config, pagoda.checkpoints.resolve;"
        "print(sorted({'torch', 'numpy', 'gguf'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
