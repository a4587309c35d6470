# SPDX-License-Identifier: Apache-2.0
"""Llama, and families of other makers that differ from it in a norm, a bias, a map or a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    WINDOW_PATTERN,
    every_nth_full,
    gguf_windows,
    text_sizes,
    typed_windows,
    unrotated_layers,
    with_attention,
    with_given_window,
    with_layer_norm,
    without_rotation,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import MlpSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, GGUF_NEIGHBOURS, TensorNames

# ---- Llama 2 and 3, and models of the same shape: Yi, SmolLM2, TinyLlama, DeepSeek-R1 distillations


def _adapt_llama(spec: ModelSpec, fields: Fields) -> ModelSpec:
    mlp = MlpSpec(fields.positive("intermediate_size"), fields.flag("mlp_bias", False))
    return spec.with_layers(lambda _, layer: replace(layer, mlp=mlp))


LLAMA = Family(
    "LlamaForCausalLM",
    "Llama 2 and 3, SmolLM2, TinyLlama, Yi, Falcon 3, DeepSeek-R1 distillations; text of SmolVLM, Idefics3",
    _adapt_llama,
    gguf=GgufFormat("llama", names=GGUF_NEIGHBOURS),
    other_gguf=(
        GgufFormat("xverse", names=GGUF_NEIGHBOURS),
        GgufFormat(
            "llama-embed",
            names=GGUF_NEIGHBOURS,
            values=lambda _: {"is_causal": False},
            causal=False,
        ),
    ),
    model_types={"llama": text_sizes(32_000, 4096, 11_008, 32, 32, None, 2048)},
    partial_rotary=1.0,
    own_keys=frozenset({"mlp_bias"}),
    aliases=frozenset(
        {"AquilaForCausalLM", "AquilaModel", "LLaMAForCausalLM", "XverseForCausalLM"}
    ),
)


# ---- CWM: Llama with windows in three of four layers (FAIR CodeGen 2025)


def _adapt_cwm(spec: ModelSpec, fields: Fields) -> ModelSpec:
    usual = [
        "sliding_attention" if layer % 4 else "full_attention" for layer in range(spec.num_layers)
    ]
    windows = typed_windows(fields, spec.num_layers, usual, 8192)
    return with_attention(_adapt_llama(spec, fields), windows)


_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CWM = Family(
    "CwmForCausalLM",
    "CWM 32B",
    _adapt_cwm,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "rope_parameters": _CWM_ROPE,
    },
    own_keys=frozenset({"mlp_bias"}),
)


# ---- SmolLM3: Llama in which every fourth layer does not tell positions (NoPE, Yang et al. 2025)


def _adapt_smollm3(spec: ModelSpec, fields: Fields) -> ModelSpec:
    if fields.flag("use_sliding_window", False):
        fields.refuse("use_sliding_window", "must be false in models of SmolLM3")
    spec = _adapt_llama(spec, fields)
    return without_rotation(spec, unrotated_layers(fields, spec.num_layers))


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "SmolLM3",
    _adapt_smollm3,
    gguf=GgufFormat("smollm3", names=GGUF_NEIGHBOURS),
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    own_keys=frozenset({"mlp_bias", "no_rope_layers", "no_rope_layer_interval"}),
)


# ---- Seed-OSS: Llama with biases of queries, keys and values, and of the MLP if it says so


def _adapt_seed_oss(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return with_attention(
        _adapt_llama(spec, fields),
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
    )


SEED_OSS = Family(
    "SeedOssForCausalLM",
    "Seed-OSS",
    _adapt_seed_oss,
    gguf=GgufFormat("seed_oss", names=replace(GGUF_NAMES, mlp_norm="post_attention_norm")),
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    own_keys=frozenset({"mlp_bias", "attention_out_bias"}),
)


# ---- Phi-3, Phi-3.5 and Phi-4: Llama with joined maps, and factors of frequencies for long contexts


_JOINED = "self_attn.qkv_proj"
PHI3 = Family(
    "Phi3ForCausalLM",
    "Phi-3, Phi-3.5, Phi-4, Phi-4-mini, text of Phi-3.5-vision and VLM2Vec",
    with_given_window,
    names=TensorNames(
        query=_JOINED, key=_JOINED, value=_JOINED, gate="mlp.gate_up_proj", up="mlp.gate_up_proj"
    ),
    gguf=GgufFormat("phi3", keys={"attention.sliding_window": "sliding_window"}),
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    partial_rotary=1.0,
    aliases=frozenset({"Phi3VForCausalLM"}),
)


# ---- StableLM 2: Llama with layer norms, a quarter of every head being rotated (Bellagente et al. 2024)


def _adapt_stablelm(spec: ModelSpec, fields: Fields) -> ModelSpec:
    norm = "layer" if fields.flag("qk_layernorm", False) else None
    bias = fields.flag("use_qkv_bias", False)
    spec = with_attention(spec, qkv_bias=bias, output_bias=False, qk_norm=norm)
    if fields.flag("use_parallel_residual", False):
        spec = spec.with_layers(lambda _, layer: replace(layer, parallel=True))
    return with_layer_norm(spec, fields, bias=True)


STABLELM = Family(
    "StableLmForCausalLM",
    "StableLM 2 1.6B and 12B, StableLM 3B",
    _adapt_stablelm,
    names=TensorNames(
        query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm", head_norms="listed"
    ),
    gguf=GgufFormat(
        "stablelm",
        keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
        # llama.cpp's converter says so of all models that are silent on it; those that are so lack a norm.
        read=frozenset({"use_parallel_residual"}),
    ),
    partial_rotary=0.25,
    own_keys=frozenset({"qk_layernorm", "use_parallel_residual", "use_qkv_bias"}),
    aliases=frozenset({"StableLMEpochForCausalLM"}),
    defaults={"num_key_value_heads": 32},
)


# ---- EXAONE 4: norms behind instead of before, and layers of full attention that do not tell positions


def _adapt_exaone4(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = spec.with_layers(lambda _, layer: replace(layer, pre_norm=False, post_norm=True))
    windows = every_nth_full(fields, spec.num_layers, 4)
    spec = with_attention(spec, windows, qk_norm="head")
    if fields.values.get("sliding_window", 4096) is None:
        return spec
    return without_rotation(spec, [window is None for window in windows])


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Kinds of layers; files of models without windows are silent on them."""
    return {"sliding_window": None, **gguf_windows(fields)}


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    "EXAONE 4.0, text of EXAONE 4.5",
    _adapt_exaone4,
    names=TensorNames(attention_post_norm="post_attention_layernorm"),
    gguf=GgufFormat(
        "exaone4",
        keys={"attention.sliding_window": "sliding_window"},
        values=_gguf_values,
        read=frozenset({WINDOW_PATTERN}),
    ),
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    model_types={"exaone4": text_sizes(102_400, 4096, 16_384, 32, 32, 32, 2048)},
)
