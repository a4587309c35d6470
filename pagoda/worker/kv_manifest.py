"""What makes two blocks under one key the same bytes: model, arithmetic and layout, as a manifest."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pagoda.engine.messages import WorkerConfig
from pagoda.kv.objects import Manifest
from pagoda.model.config import ModelConfig
from pagoda.model.weights import weight_files
from pagoda.models.gguf import is_gguf, read_gguf
from pagoda.models.presets import PRESETS
from pagoda.worker.kv_memory import KVMemory
from pagoda.worker.loading import WorkerPlan

_SAMPLE_BYTES = 4096
_LENGTH_BYTES = 8
"""Of a safetensors file: they say how long its header is."""

_Stored = tuple[Path, int, int, str]
"""File, first byte, number of bytes, and what the tensor is."""


def make_manifest(plan: WorkerPlan, memory: KVMemory, arithmetic: str) -> Manifest:
    """Of the objects of one rank.

    Raises:
        ConfigError: the model's files cannot be read.
    """
    config, parallel, place = plan.config, plan.config.parallel, plan.config.place
    return Manifest(
        model=Path(config.model).name,
        model_digest=_model_digest(config, plan.shard.config),
        dtype=plan.dtype_name,
        kv_dtype=plan.kv_dtype_name,
        quantization="none" if plan.quantization is None else plan.quantization.summary,
        arithmetic=arithmetic,
        layout=memory.layout,
        block_size=plan.block_size,
        payload_bytes=memory.block_bytes,
        tensor_parallel_size=parallel.tensor_parallel_size,
        tensor_parallel_rank=place.tp,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        stage=place.pp,
        expert_parallel=parallel.expert_parallel,
    )


def _model_digest(config: WorkerConfig, shape: ModelConfig) -> str:
    """SHA-256 of what the model is. A copy of it elsewhere has the same; times and names do not count."""
    digest = hashlib.sha256()
    path = Path(config.model)
    if config.load_format == "dummy":
        digest.update(f"dummy:{config.seed}:".encode())
    if config.load_format == "dummy" and config.model in PRESETS:
        digest.update(config.model.encode())
    elif is_gguf(path):
        # How each tensor is quantized comes with the tensors.
        digest.update(repr(replace(shape, quantization=None)).encode())
        _sample(_gguf_tensors(path), digest)
    else:
        digest.update((path / "config.json").read_bytes())
        if config.load_format != "dummy":
            for file in weight_files(path):
                _sample(_stored_tensors(file), digest)
    return digest.hexdigest()


def _gguf_tensors(path: Path) -> Iterator[_Stored]:
    for tensor in read_gguf(path).tensors.values():
        what = f"{tensor.name} {tensor.type.name} {tensor.shape}"
        yield tensor.path, tensor.start, tensor.num_bytes, what


def _stored_tensors(path: Path) -> Iterator[_Stored]:
    """Where the tensors of a safetensors file lie."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            what = f"{name} {entry['dtype']} {entry['shape']}"
            yield path, _LENGTH_BYTES + length + start, end - start, what


def _sample(tensors: Iterable[_Stored], digest: hashlib._Hash) -> None:
    """What each tensor is, and its beginning, middle and end: whatever was trained differs nearly everywhere.

    The whole of a large file would take longer than loading it did; pieces come from the page cache.
    """
    opened: dict[Path, BinaryIO] = {}
    with contextlib.ExitStack() as stack:
        for path, start, num_bytes, what in sorted(tensors, key=itemgetter(3)):
            if path not in opened:
                opened[path] = stack.enter_context(path.open("rb", buffering=0))
            digest.update(f"{what} {num_bytes}".encode())
            last = max(0, num_bytes - _SAMPLE_BYTES)
            for offset in sorted({0, last // 2, last}):
                count = min(_SAMPLE_BYTES, num_bytes)
                digest.update(os.pread(opened[path].fileno(), count, start + offset))
