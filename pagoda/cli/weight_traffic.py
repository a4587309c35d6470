"""How many bytes of weights a decode step reads, from a Hugging Face config or the header of a GGUF file alone.

A step multiplies by every weight once, whatever the batch. Of the input embedding it reads one row a
token, so only the output projection counts, be it tied or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagoda.errors import ConfigError
from pagoda.models.gguf import GgufFile
from pagoda.models.gguf_config import DTYPE, EMBEDDING, HEAD, HELD_AS, config_values

BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}


class _Shape(msgspec.Struct):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    torch_dtype: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class WeightTraffic:
    """Of one decode step."""

    weights: int
    dtype: str
    num_bytes: int


def weight_traffic(config: Mapping[str, object], dtype: str, source: str) -> WeightTraffic:
    """Of a dense decoder with grouped-query attention and a gated MLP (Qwen, Llama, Mistral).

    `dtype` `auto` takes the config's own. Norms and biases, less than a thousandth, are left out.

    Raises:
        ConfigError: `source` does not describe such a model.
    """
    try:
        shape = msgspec.convert(config, _Shape)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{source} is not the config of a dense decoder model: {error}."
        ) from error
    chosen = (shape.dtype or shape.torch_dtype or "float32") if dtype == "auto" else dtype
    if chosen not in BYTES_PER_WEIGHT:
        raise ConfigError(f"{source} has dtype {chosen}; known are {', '.join(BYTES_PER_WEIGHT)}.")
    head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    kv_heads = shape.num_key_value_heads or shape.num_attention_heads
    attention = shape.hidden_size * head_dim * 2 * (shape.num_attention_heads + kv_heads)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    output = shape.vocab_size * shape.hidden_size
    weights = shape.num_hidden_layers * (attention + mlp) + output
    return WeightTraffic(weights, chosen, weights * BYTES_PER_WEIGHT[chosen])


def gguf_traffic(file: GgufFile, dtype: str) -> WeightTraffic:
    """Of a GGUF file, whose quantized matrices stay so.

    Raises:
        ConfigError: the file is not of a model that Pagoda runs.
    """
    config_values(file)
    dense = DTYPE if dtype == "auto" else dtype
    matrices = [
        tensor
        for tensor in file.tensors.values()
        if len(tensor.shape) > 1 and not (tensor.name == EMBEDDING and HEAD in file.tensors)
    ]
    bits: dict[str, float] = {name: codes.bits_per_weight for name, codes in HELD_AS.items()}
    sizes = [
        math.prod(tensor.shape) * bits.get(tensor.type.name, 8 * BYTES_PER_WEIGHT[dense]) / 8
        for tensor in matrices
    ]
    kinds = sorted({tensor.type.name for tensor in matrices} & bits.keys())
    weights = sum(math.prod(tensor.shape) for tensor in matrices)
    return WeightTraffic(weights, ", ".join(kinds) or dense, int(sum(sizes)))


def read_config(directory: Path) -> dict[str, object]:
    """The config.json of a model directory.

    Raises:
        ConfigError: it cannot be read.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return config
