# SPDX-License-Identifier: Apache-2.0
"""Cards of models, for lists of them: size on disk, parameters, architecture and format of weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagoda.checkpoints.checkpoint import weight_files
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.checkpoints.resolve import ModelFiles
from pagoda.checkpoints.safetensors_header import read_header
from pagoda.errors import ConfigError
from pagoda.files import read_regular

_CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""Keys of GGUF files behind the architecture, with the fields of config.json that say the same."""
_PACKED = {"I32": 8, "U8": 2}
"""Weights in an element of tensors that hold several: those of four bits."""


@dataclass(frozen=True)
class ModelCard:
    architecture: str = "unknown"
    """`model_type` of config.json, or `general.architecture` of a GGUF file."""
    format: str = "safetensors"
    num_bytes: int = 0
    """Size of the files of weights."""
    num_parameters: int = 0
    """Elements of all tensors."""
    weights: str = "unknown"
    """Type of most weights, such as BF16 or Q4_K, or the method of quantization."""
    digest: str = ""
    """SHA-256 of names, sizes and forms of all tensors and of the configuration, in hex."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Further numbers of the architecture, by the names that GGUF files have for them."""

    @property
    def parameter_size(self) -> str:
        """The number of parameters as people say it, such as 1.5B."""
        for unit, name in ((10**9, "B"), (10**6, "M")):
            if self.num_parameters >= unit:
                return f"{self.num_parameters / unit:.2f}".rstrip("0").rstrip(".") + name
        return f"{self.num_parameters / 1000:.2f}K"


def read_card(files: ModelFiles) -> ModelCard:
    """The card of a model, from the headers of its files; that of a model without weights tells its name alone."""
    try:
        if files.gguf is not None:
            return _of_gguf(files.gguf)
        if files.directory is not None:
            return _of_directory(files.directory)
    except (ConfigError, OSError, ValueError):
        pass  # a shape without weights, or files that have changed since the model was loaded
    return ModelCard(digest=hashlib.sha256(files.model.encode()).hexdigest())


def _of_gguf(path: Path) -> ModelCard:
    file = read_gguf(path)
    architecture = file.metadata.text("general.architecture")
    values = file.metadata.values
    sizes = {name: values.get(f"{architecture}.{name}") for name in _CONFIG_KEYS}
    tensors = [
        (it.name, it.type.name, it.shape, it.num_bytes, math.prod(it.shape))
        for it in file.tensors.values()
    ]
    paths = {it.path for it in file.tensors.values()}
    return _card(architecture, "gguf", tensors, paths, b"", sizes)


def _of_directory(directory: Path) -> ModelCard:
    text = read_regular(directory / "config.json")
    config: dict[str, Any] = json.loads(text)
    inner = config.get("text_config")
    shape = {**config, **inner} if isinstance(inner, dict) else config
    sizes = {name: shape.get(key) for name, key in _CONFIG_KEYS.items()}
    paths = weight_files(directory)
    tensors = [it for path in paths for it in _stored(path)]
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    card = _card(str(config.get("model_type")), "safetensors", tensors, set(paths), text, sizes)
    return card if method is None else replace(card, weights=str(method).upper())


_Tensor = tuple[str, str, tuple[int, ...], int, int]
"""Name, type, shape, bytes and number of parameters."""


def _stored(path: Path) -> Iterator[_Tensor]:
    for name, tensor in read_header(path)[0].items():
        start, end = tensor.data_offsets
        count = math.prod(tensor.shape) * _PACKED.get(tensor.dtype, 1)
        yield name, tensor.dtype, tensor.shape, end - start, count


def _card(
    architecture: str,
    form: str,
    tensors: list[_Tensor],
    paths: set[Path],
    config: bytes,
    sizes: Mapping[str, object],
) -> ModelCard:
    by_type: Counter[str] = Counter()
    for _, kind, _, _, count in tensors:
        by_type[kind] += count
    told = "\n".join(f"{name} {kind} {shape}" for name, kind, shape, _, _ in sorted(tensors))
    return ModelCard(
        architecture,
        form,
        sum(path.stat().st_size for path in paths),
        by_type.total(),
        by_type.most_common(1)[0][0] if by_type else "unknown",
        hashlib.sha256(config + told.encode()).hexdigest(),
        {name: value for name, value in sizes.items() if isinstance(value, int)},
    )
