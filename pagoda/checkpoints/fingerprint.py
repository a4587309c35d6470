# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of models, equal where two hosts serve the same model.

A copy of a model elsewhere has the same fingerprint; times and names do not count. Of the weights, what each
tensor is counts, and 4 KiB of every 256 KiB of it, its beginning and its end among them: whatever was trained
differs nearly everywhere, and so do an expert, a layer and most of a vocabulary. Checkpoints that differ only in
some rows between two samples look the same. The whole of a large file would take longer than loading it did.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from pagoda.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, weight_files
from pagoda.checkpoints.gguf.reader import GgufFile, is_gguf, read_gguf
from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.resolve import ModelFiles
from pagoda.checkpoints.safetensors_header import read_header
from pagoda.errors import ConfigError
from pagoda.files import open_regular, read_regular

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.spm", "*.txt")
_TEXT_KEYS = "tokenizer."
"""Prefix of the keys of a GGUF file that are about text alone."""
_SAMPLE_BYTES = 2**12
_STRIDE_BYTES = 2**18

_Stored = tuple[Path, int, int, str]
"""File, first byte, number of bytes, and what the tensor is."""


def model_digest(files: ModelFiles) -> str:
    """SHA-256 of all that turns text into tokens and back, and of the weights that are there, in hex."""
    digest = hashlib.sha256()
    if files.gguf is not None:
        _add_gguf(read_gguf(files.gguf), digest, lambda _: True)
    elif files.directory is not None:
        found = (p for pattern in _TEXT_FILES for p in files.directory.glob(pattern))
        for path in sorted(p for p in found if p.is_file()):
            digest.update(path.name.encode() + b"\0" + _bytes_of(path))
        if any((files.directory / name).exists() for name in (INDEX_FILE, SINGLE_FILE)):
            _add_weights(files.directory, digest)
    else:
        digest.update(files.model.encode())
    return digest.hexdigest()


def weights_digest(model: str, load_format: str, seed: int) -> str:
    """SHA-256 of all that K and V of given tokens depend on, in hex: configuration and weights, not the tokenizer.

    The arguments are those of `WorkerConfig`.
    """
    digest = hashlib.sha256()
    path = Path(model)
    is_dummy = load_format == "dummy"
    if is_dummy:
        digest.update(f"dummy:{seed}:".encode())
    if is_dummy and model in PRESETS:
        digest.update(model.encode())
    elif is_gguf(path):
        _add_gguf(read_gguf(path), digest, lambda key: not key.startswith(_TEXT_KEYS))
    else:
        digest.update(_bytes_of(path / "config.json"))
        if not is_dummy:
            _add_weights(path, digest)
    return digest.hexdigest()


def _bytes_of(path: Path) -> bytes:
    """Raises ConfigError: the file cannot be read."""
    try:
        return read_regular(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def _add_gguf(file: GgufFile, digest: hashlib._Hash, counts: Callable[[str], bool]) -> None:
    """Adds metadata and tensors of `file`, with the type of each tensor."""
    for key, value in sorted(file.metadata.values.items()):
        if counts(key):
            digest.update(f"{key}={value!r}\0".encode())
    _sample(_gguf_tensors(file), digest)


def _add_weights(directory: Path, digest: hashlib._Hash) -> None:
    for file in weight_files(directory):
        _sample(_stored_tensors(file), digest)


def _gguf_tensors(file: GgufFile) -> Iterator[_Stored]:
    for tensor in file.tensors.values():
        what = f"{tensor.name} {tensor.type.name} {tensor.shape}"
        yield tensor.path, tensor.start, tensor.num_bytes, what


def _stored_tensors(path: Path) -> Iterator[_Stored]:
    """Yields the places of the tensors of a safetensors file."""
    tensors, offset = read_header(path)
    for name, tensor in tensors.items():
        start, end = tensor.data_offsets
        what = f"{name} {tensor.dtype} {list(tensor.shape)}"
        yield path, offset + start, end - start, what


def _sample(tensors: Iterable[_Stored], digest: hashlib._Hash) -> None:
    opened: dict[Path, BinaryIO] = {}
    with contextlib.ExitStack() as stack:
        for path, start, num_bytes, what in sorted(tensors, key=itemgetter(3)):
            if path not in opened:
                file = opened[path] = stack.enter_context(
                    open(path, "rb", buffering=0, opener=open_regular)
                )
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            digest.update(f"{what} {num_bytes}".encode())
            last = max(0, num_bytes - _SAMPLE_BYTES)
            for offset in (*range(0, last, _STRIDE_BYTES), last):
                count = min(_SAMPLE_BYTES, num_bytes)
                digest.update(os.pread(opened[path].fileno(), count, start + offset))
