"""Bytes of weights that a decode step reads, from a model's config and the headers of its files alone.

A step multiplies by every weight once, whatever the batch; of experts, by those that its tokens go through. Of
the input embedding it reads one row a token, so only the output projection counts, be it tied or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pagoda.checkpoints.gguf.config import DTYPE, held_as, is_dense, matrices
from pagoda.checkpoints.gguf.reader import GgufFile
from pagoda.checkpoints.model_config import GGUF_NAMES, ModelConfig
from pagoda.checkpoints.weight_formats import format_bytes

BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANTIZED_BYTES = {"int8": 1, "int4": 4.5 / 8}
"""Bytes of a quantized weight, of int4 with its share of the scale that a group of 32 has."""


@dataclass(frozen=True)
class WeightTraffic:
    """Weights that one decode step reads."""

    num_bytes: int
    dtype: str


def weight_traffic(config: ModelConfig, dtype: str, quantization: str = "none") -> WeightTraffic:
    """Traffic of one token in a model whose weights are dense in their files.

    `dtype` `auto` takes the config's own; `quantization` is `none`, `int8` or `int4` in groups of 32, with an int8
    head. Norms, biases and the scales of int8, less than a hundredth, are left out.
    """
    chosen = config.dtype if dtype == "auto" else dtype
    layers = sum(config.weights_per_token(layer) for layer in range(config.num_layers))
    head = config.head.outputs * config.head.inputs
    if quantization == "none":
        return WeightTraffic((layers + head) * BYTES_PER_WEIGHT[chosen], chosen)
    return WeightTraffic(int(layers * _QUANTIZED_BYTES[quantization]) + head, quantization)


def gguf_traffic(file: GgufFile, dtype: str) -> WeightTraffic:
    """Traffic of a GGUF file, whose quantized matrices stay quantized."""
    dense = DTYPE if dtype == "auto" else dtype
    table, head = f"{GGUF_NAMES.embedding}.weight", f"{GGUF_NAMES.head}.weight"
    read = [t for t in matrices(file) if t.name != table or head not in file.tensors]
    num_bytes = sum(
        format_bytes(held_as(t.type), math.prod(t.shape[:-1]), t.shape[-1], BYTES_PER_WEIGHT[dense])
        for t in read
    )
    kinds = sorted({t.type.name for t in read if not is_dense(t)})
    return WeightTraffic(num_bytes, ", ".join(kinds) or dense)


def stored_traffic(config: ModelConfig, directory: Path) -> WeightTraffic:
    """Traffic of a model that is quantized in its files: all their bytes but those of an embedding table."""
    table = config.vocab_size * config.hidden_size * BYTES_PER_WEIGHT[config.dtype]
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return WeightTraffic(stored if config.tie_word_embeddings else stored - table, "quantized")
