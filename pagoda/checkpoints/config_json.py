"""The one reader of config.json: presets, model directories and GGUF files all pass through here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pagoda.checkpoints.families import FAMILIES
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_config import Family, ModelConfig
from pagoda.checkpoints.quantization_config import parse_quantization
from pagoda.checkpoints.rope import longest_sequence, parse_rope
from pagoda.errors import ConfigError

_BARE, _WITH_HEAD = "Model", "ForCausalLM"
"""Endings of the names of architectures."""
DTYPES = ("float32", "bfloat16", "float16")

_NEUTRAL: Mapping[str, object] = {
    "alibi": False,
    "attention_chunk_size": 0,
    "attention_multiplier": 1,
    "attn_logit_softcapping": 0,
    "clip_qkv": 0,
    "dual_chunk_attention_config": {},
    "embedding_multiplier": 1,
    "final_logit_softcapping": 0,
    "first_k_dense_replace": 0,
    "logit_scale": 1,
    "logits_scaling": 1,
    "mlp_bias": False,
    "n_group": 1,
    "n_shared_experts": 0,
    "no_rope_layers": [],
    "num_shared_experts": 0,
    "partial_rotary_factor": 1,
    "query_pre_attn_scalar": 0,
    "residual_multiplier": 1,
    "rope_interleave": False,
    "routed_scaling_factor": 1,
    "scale_depth": 1,
    "scale_emb": 1,
    "scoring_func": "softmax",
    "shared_expert_intermediate_size": 0,
    "use_alibi": False,
    "use_mrope": False,
    "use_qk_norm": False,
}
"""Keys that would change arithmetic which Pagoda does not compute, each with the value that leaves it as it is."""


def read_model_config(directory: Path) -> ModelConfig:
    """The config.json in a model directory.
    Raises ConfigError: the file is missing, corrupt or describes a model that Pagoda does not run."""
    path = directory / "config.json"
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; give a Hugging Face model directory.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return parse_model_config(values, source=str(path))


def parse_model_config(values: Mapping[str, object], *, source: str) -> ModelConfig:
    """Checks the content of a config.json; `source` names the file in errors."""
    fields = Fields(values, source)
    family, is_bare = _family(fields)
    _refuse_other_arithmetic(fields, family)
    hidden_size = fields.positive("hidden_size")
    num_layers = fields.positive("num_hidden_layers")
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    head_dim = fields.positive(
        "head_dim", family.default_head_dim or max(1, hidden_size // num_heads)
    )
    if head_dim % 2:
        fields.refuse("head_dim", "must be even")
    scaling, rope_theta = parse_rope(fields)
    attention_bias = fields.flag("attention_bias", False)
    shared = ModelConfig(
        family=family,
        names=family.names,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=longest_sequence(fields, scaling),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False) or is_bare,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_windows=(None,) * num_layers,
        dtype=_dtype(fields),
        quantization=parse_quantization(fields),
    )
    return family.adapt(shared, fields)


def _family(fields: Fields) -> tuple[Family, bool]:
    """The family of a model, and whether it is a decoder alone (`Qwen3Model`), which has no head: embedding models
    are published so. Its embedding table is the head then."""
    named = fields.values.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(named, list) or not named:
        raise ConfigError(f"{fields.source} names no architectures; Pagoda runs models of {known}.")
    for name in named:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name], False
        if isinstance(name, str) and name.endswith(_BARE):
            whole = f"{name.removesuffix(_BARE)}{_WITH_HEAD}"
            if whole in FAMILIES:
                return FAMILIES[whole], True
    raise ConfigError(
        f"{fields.source}: architecture {named[0]!r} is not supported; Pagoda runs models of {known}."
    )


def _refuse_other_arithmetic(fields: Fields, family: Family) -> None:
    for name in ("hidden_act", "hidden_activation"):
        if fields.text(name, "silu") not in ("silu", "swish"):
            fields.refuse(name, "must be 'silu'")
    for name, neutral in _NEUTRAL.items():
        if name not in family.own_keys:
            fields.require(name, neutral)


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        fields.refuse(name, f"must be one of {', '.join(DTYPES)}")
    return dtype
