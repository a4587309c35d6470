"""How many bytes of weights a decode step reads, from a Hugging Face config or the header of a GGUF file alone.

A step multiplies by every weight once, whatever the batch; of experts, by those that its tokens go through. Of
the input embedding it reads one row a token, so only the output projection counts, be it tied or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagoda.checkpoints.gguf.config import DTYPE, EMBEDDING, HEAD, HELD_AS, config_values
from pagoda.checkpoints.gguf.reader import GgufFile
from pagoda.errors import ConfigError

BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANTIZED_BYTES = {"int8": 1, "int4": 4.5 / 8}
"""A weight of int4 with its share of the scale that a group of 32 has."""


class _Shape(msgspec.Struct):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None

    @property
    def mlp_weights(self) -> int:
        """Of all layers, those that one token is multiplied with."""
        num_experts = self.num_local_experts or self.num_experts
        dense = 3 * self.hidden_size * self.intermediate_size
        if not num_experts:
            return self.num_hidden_layers * dense
        layers = range(
            self.decoder_sparse_step - 1, self.num_hidden_layers, self.decoder_sparse_step
        )
        num_sparse = len(set(layers) - set(self.mlp_only_layers or ()))
        inner = self.moe_intermediate_size or self.intermediate_size
        sparse = self.hidden_size * (3 * inner * self.num_experts_per_tok + num_experts)
        return num_sparse * sparse + (self.num_hidden_layers - num_sparse) * dense


@dataclass(frozen=True)
class WeightTraffic:
    """Of one decode step."""

    num_bytes: int
    dtype: str


def weight_traffic(
    config: Mapping[str, object], dtype: str, source: str, quantization: str = "none"
) -> WeightTraffic:
    """Of a decoder with grouped-query attention and gated MLPs (Qwen, Llama, Mistral); of experts, for one token.

    `dtype` `auto` takes the config's own; `quantization` is `none`, `int8` or `int4` in groups of 32, with an int8
    head. Norms, biases and the scales of int8, less than a hundredth, are left out.

    Raises:
        ConfigError: `source` does not describe such a model.
    """
    shape = _shape(config, source)
    chosen = _dtype(shape, dtype, source)
    head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    kv_heads = shape.num_key_value_heads or shape.num_attention_heads
    attention = shape.hidden_size * head_dim * 2 * (shape.num_attention_heads + kv_heads)
    layers = shape.num_hidden_layers * attention + shape.mlp_weights
    head = shape.vocab_size * shape.hidden_size
    if quantization == "none":
        return WeightTraffic((layers + head) * BYTES_PER_WEIGHT[chosen], chosen)
    return WeightTraffic(int(layers * _QUANTIZED_BYTES[quantization]) + head, quantization)


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
    return WeightTraffic(int(sum(sizes)), ", ".join(kinds) or dense)


def is_quantized(config: Mapping[str, object]) -> bool:
    """Whether the weights that the config belongs to are quantized in their files."""
    return any(config.get(name) for name in ("quantization_config", "compression_config"))


def stored_traffic(config: Mapping[str, object], directory: Path) -> WeightTraffic:
    """Of a model that is quantized in its files: all that they hold but an embedding table of its own.

    Raises:
        ConfigError: the config does not describe a dense decoder model.
    """
    source = str(directory / "config.json")
    shape = _shape(config, source)
    table = shape.vocab_size * shape.hidden_size * BYTES_PER_WEIGHT[_dtype(shape, "auto", source)]
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return WeightTraffic(stored if shape.tie_word_embeddings else stored - table, "quantized")


def _shape(config: Mapping[str, object], source: str) -> _Shape:
    try:
        return msgspec.convert(config, _Shape)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{source} is not the config of a dense decoder model: {error}."
        ) from error


def _dtype(shape: _Shape, wanted: str, source: str) -> str:
    chosen = (shape.dtype or shape.torch_dtype or "float32") if wanted == "auto" else wanted
    if chosen not in BYTES_PER_WEIGHT:
        raise ConfigError(f"{source} has dtype {chosen}; known are {', '.join(BYTES_PER_WEIGHT)}.")
    return chosen


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
