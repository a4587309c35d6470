"""The model in a GGUF file: its metadata in the words of config.json, and what only tensors say."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.families import GGUF_FAMILIES
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.gguf.reader import BlockType, GgufFile, GgufTensor
from pagoda.checkpoints.model_config import GGUF_NAMES, LinearSpec, ModelConfig
from pagoda.checkpoints.rope import FrequencyFactors
from pagoda.checkpoints.weight_formats import (
    BlockFormat,
    DenseFormat,
    WeightFormat,
)
from pagoda.errors import ConfigError

DTYPE = "bfloat16"
"""Type of activations unless the operator says otherwise: a GGUF file does not name the type of training."""
DENSE = ("F32", "F16", "BF16")
"""Types whose tensors hold plain numbers."""
BLOCKS = {
    "Q4_0": BlockFormat(4, 32, 32, integer_scales=False, minima=False),
    "Q8_0": BlockFormat(8, 32, 32, integer_scales=False, minima=False),
    "Q4_1": BlockFormat(4, 32, 32, integer_scales=False, minima=True),
    "Q5_0": BlockFormat(5, 32, 32, integer_scales=False, minima=False),
    "Q5_1": BlockFormat(5, 32, 32, integer_scales=False, minima=True),
    "IQ4_NL": BlockFormat(4, 32, 32, integer_scales=False, minima=False, codebook=True),
    "IQ4_XS": BlockFormat(4, 32, 256, integer_scales=True, minima=False, codebook=True),
    "Q2_K": BlockFormat(2, 16, 256, integer_scales=True, minima=True),
    "Q3_K": BlockFormat(3, 16, 256, integer_scales=True, minima=False),
    "Q4_K": BlockFormat(4, 32, 256, integer_scales=True, minima=True),
    "Q5_K": BlockFormat(5, 32, 256, integer_scales=True, minima=True),
    "Q6_K": BlockFormat(6, 16, 256, integer_scales=True, minima=False),
}
"""Formats in memory of quantized types."""

EMBEDDING, HEAD = f"{GGUF_NAMES.embedding}.weight", f"{GGUF_NAMES.head}.weight"
FREQUENCY_FACTORS = "rope_freqs.weight"
_PER_LAYER = (
    GGUF_NAMES.attention_norm,
    GGUF_NAMES.query,
    GGUF_NAMES.key,
    GGUF_NAMES.value,
    GGUF_NAMES.query_norm,
    GGUF_NAMES.key_norm,
    GGUF_NAMES.attention_out,
    GGUF_NAMES.mlp_norm,
    GGUF_NAMES.gate,
    GGUF_NAMES.up,
    GGUF_NAMES.down,
    "attn_rot_embd",  # a leftover in old files: frequencies that follow from the metadata
)
_WHOLE = (GGUF_NAMES.embedding, GGUF_NAMES.norm, GGUF_NAMES.head, "rope_freqs")
_KNOWN = re.compile(rf"({'|'.join(_WHOLE)}|blk\.\d+\.({'|'.join(_PER_LAYER)}))\.(weight|bias)")

_OTHER_MODELS = ("expert_count", "attention.clamp_kqv", "logit_scale", "attention.scale")
"""Keys that change the arithmetic, in files of the same architectures by name."""


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """The model that metadata and tensors of a file describe; its tensors have the names of the file.
    Raises ConfigError: the file is not of a model that Pagoda runs."""
    unknown = next((name for name in file.tensors if not _KNOWN.fullmatch(name)), None)
    if unknown is not None:
        raise ConfigError(
            f"{file.path} has a tensor {unknown!r}, which is in no model that Pagoda runs."
        )
    config = parse_model_config(config_values(file), source=str(file.path))
    names, scaling = GGUF_NAMES, config.rope_scaling
    if FREQUENCY_FACTORS in file.tensors:
        if scaling is not None:
            raise ConfigError(
                f"{file.path} scales rotary frequencies twice: by {FREQUENCY_FACTORS} and by its metadata."
            )
        scaling = _frequency_factors(file, config.head_dim // 2)
    return replace(
        config,
        names=names,
        rope_scaling=scaling,
        quantization=None if all(map(is_dense, matrices(file))) else GgufQuantization(file),
        qkv_bias=_has_bias(file, names.query, names.key, names.value),
        output_bias=_has_bias(file, names.attention_out),
        mlp_bias=_has_bias(file, names.gate, names.up, names.down),
    )


def _has_bias(file: GgufFile, *names: str) -> bool:
    """One bias calls for those of the same place and of all layers, so that none is left out unseen."""
    return any(f"blk.0.{name}.bias" in file.tensors for name in names)


def _frequency_factors(file: GgufFile, count: int) -> FrequencyFactors:
    tensor = checked_tensor(file, FREQUENCY_FACTORS, (count,))
    if tensor.type.name != "F32":
        raise ConfigError(f"{file.path}: tensor {FREQUENCY_FACTORS} must be of type F32.")
    with tensor.path.open("rb") as opened:
        opened.seek(tensor.start)
        factors = struct.unpack(f"<{count}f", opened.read(tensor.num_bytes))
    if not all(0 < factor < math.inf for factor in factors):
        raise ConfigError(f"{file.path}: tensor {FREQUENCY_FACTORS} must hold positive numbers.")
    return FrequencyFactors(factors)


@dataclass(frozen=True)
class GgufQuantization:
    """Formats of the matrices of a file in memory."""

    file: GgufFile

    @property
    def summary(self) -> str:
        used = {tensor.type.name for tensor in matrices(self.file) if not is_dense(tensor)}
        return f"GGUF {', '.join(sorted(used))} weights"

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        """Raises ConfigError if the file has no such linear layer."""
        return held_as(self.file.tensor(f"{linear.name}.weight").type)


def matrices(file: GgufFile) -> Iterator[GgufTensor]:
    return (tensor for tensor in file.tensors.values() if len(tensor.shape) > 1)


def is_dense(tensor: GgufTensor) -> bool:
    return tensor.type.name in DENSE


def held_as(block: BlockType) -> WeightFormat:
    """Format in memory of a matrix that a file holds in blocks of one type."""
    if block.name in DENSE:
        return DenseFormat()
    return BLOCKS[block.name]


def checked_tensor(file: GgufFile, name: str, shape: tuple[int, ...]) -> GgufTensor:
    """The tensor `name` of a file. Raises ConfigError if the file has no such tensor, or one of another shape."""
    tensor = file.tensor(name)
    if tensor.shape != shape:
        raise ConfigError(
            f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}, "
            f"the metadata calls for {list(shape)}."
        )
    return tensor


def config_values(file: GgufFile) -> dict[str, object]:
    """Returns the values of an equivalent config.json."""
    metadata, known = file.metadata, dict.fromkeys(name for name, _ in GGUF_FAMILIES)
    architecture = metadata.text("general.architecture")
    if architecture not in known:
        metadata.refuse("general.architecture", f"must be one of {', '.join(known)}")
    fields = metadata.below(f"{architecture}.")
    for name in _OTHER_MODELS:
        if fields.values.get(name, 0) != 0:
            fields.refuse(name, "is for models that Pagoda does not run")
    window = fields.count("attention.sliding_window", 0)
    family = GGUF_FAMILIES.get((architecture, window > 0))
    if family is None:
        fields.refuse("attention.sliding_window", f"is not supported in models of {architecture}")
    hidden_size = fields.positive("embedding_length")
    num_heads = fields.positive("attention.head_count")
    values: dict[str, object] = {
        "architectures": [family.architecture],
        "vocab_size": _vocab_size(file, hidden_size),
        "hidden_size": hidden_size,
        "intermediate_size": fields.positive("feed_forward_length"),
        "num_hidden_layers": fields.positive("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.positive("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(fields, max(1, hidden_size // num_heads)),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(fields),
        "max_position_embeddings": fields.positive("context_length"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "torch_dtype": DTYPE,
    }
    if fields.positive("block_count") > len(file.tensors):
        fields.refuse("block_count", f"must not be more than the {len(file.tensors)} tensors")
    return values | ({"sliding_window": window} if window else {})


def _vocab_size(file: GgufFile, hidden_size: int) -> int:
    """The rows of the embedding table; tokens without a row could not be computed."""
    table = file.tensor(EMBEDDING)
    if len(table.shape) != 2 or table.shape[1] != hidden_size:
        raise ConfigError(
            f"{file.path}: tensor {EMBEDDING} has shape {list(table.shape)}, "
            f"but its rows must be of the embedding length {hidden_size}."
        )
    rows, key = table.shape[0], "tokenizer.ggml.tokens"
    num_tokens = len(file.metadata.texts(key, []))
    if num_tokens > rows:
        raise ConfigError(
            f"{file.path}: {key} has {num_tokens} tokens, but {EMBEDDING} {rows} rows."
        )
    return rows


def _head_dim(fields: Fields, usual: int) -> int:
    head_dim = fields.positive("attention.key_length", usual)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.positive(name, head_dim) != head_dim:
            fields.refuse(name, f"must be the key length {head_dim}")
    if head_dim % 2:
        fields.refuse("attention.key_length", "must be even")
    return head_dim


def _rope_scaling(fields: Fields) -> dict[str, object] | None:
    rope = fields.below("rope.scaling.")
    kind = rope.text("type", "none")
    if kind == "none":
        # Files of 2023 have one factor instead.
        factor = fields.number("rope.scale_linear", 1.0)
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind == "linear":
        return {"rope_type": kind, "factor": rope.number("factor")}
    if kind != "yarn":
        rope.refuse("type", "must be one of none, linear, yarn")
    for name in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        if rope.number(name, 1.0) != 1:
            rope.refuse(name, "must be 1")
    rope.require("yarn_log_multiplier", 0)
    return {
        "rope_type": kind,
        "factor": rope.number("factor"),
        "original_max_position_embeddings": rope.positive("original_context_length"),
        "beta_fast": rope.number("yarn_beta_fast", 32.0),
        "beta_slow": rope.number("yarn_beta_slow", 1.0),
    }
