"""What makes two blocks under one key the same bytes: model, arithmetic and layout, as a manifest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pagoda.engine.messages import WorkerConfig
from pagoda.kv.objects import Manifest
from pagoda.model.weights import weight_files
from pagoda.models.gguf import GgufFile, is_gguf, read_gguf
from pagoda.models.presets import PRESETS
from pagoda.worker.kv_memory import KVMemory
from pagoda.worker.loading import WorkerPlan

_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096


def make_manifest(plan: WorkerPlan, memory: KVMemory, arithmetic: str) -> Manifest:
    """Of the objects of one rank.

    Raises:
        ConfigError: the model's files cannot be read.
    """
    config, parallel, place = plan.config, plan.config.parallel, plan.config.place
    return Manifest(
        model=Path(config.model).name,
        model_digest=_model_digest(config),
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
    )


def _model_digest(config: WorkerConfig) -> str:
    """SHA-256 of what the model is. A copy of it elsewhere has the same; times and names do not count."""
    digest = hashlib.sha256()
    path = Path(config.model)
    if config.load_format == "dummy" and config.model in PRESETS:
        digest.update(f"dummy:{config.model}:{config.seed}".encode())
    elif is_gguf(path):
        for part in _parts(read_gguf(path)):
            _sample(part, digest)
    else:
        digest.update((path / "config.json").read_bytes())
        if config.load_format == "dummy":
            digest.update(f"dummy:{config.seed}".encode())
        else:
            for part in weight_files(path):
                _sample(part, digest)
    return digest.hexdigest()


def _parts(file: GgufFile) -> list[Path]:
    return sorted({tensor.path for tensor in file.tensors.values()})


def _sample(path: Path, digest: hashlib._Hash) -> None:
    """Length, beginning, end and pieces between, evenly spaced: other weights differ nearly everywhere.

    The whole of a large file would take longer than loading it.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - _SAMPLE_BYTES)
        for index in range(_NUM_SAMPLES + 1):
            file.seek(last * index // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
