# SPDX-License-Identifier: Apache-2.0
"""Tiny models of families whose makers publish code of their own.

They are models of transformers that compute the same, with tensors and fields by the makers' names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from family_models import make_random
from newer_code_models import NEWER
from own_code import OwnCode, Tensors
from own_oracles import Jais, Ouro, Plamo2
from safetensors.torch import load_file, save_file


def _joined(name: str, parts: str, *, by_head: bool = False) -> Callable[[Tensors, Any], None]:
    """Makes one tensor of queries, keys and values, which are called `parts` with q, k and v."""

    def join(tensors: Tensors, config: Any) -> None:
        kv_heads = config.num_key_value_heads
        for query in [it for it in tensors if re.search(parts.format("q"), it)]:
            three = [
                tensors.pop(query.replace(parts.format("q"), parts.format(it))) for it in "qkv"
            ]
            if by_head:
                three = [it.unflatten(0, (kv_heads, -1)) for it in three]
            both = torch.cat(three, dim=int(by_head))
            tensors[query.replace(parts.format("q"), name)] = both.flatten(0, int(by_head))

    return join


def _apart(tensors: Tensors, config: Any) -> None:
    """Makes tensors of queries, keys, values, gates and ups of those that hold several."""
    kv = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    for name in [it for it in tensors if it.endswith(("qkv_proj.weight", "gate_up_proj.weight"))]:
        tensor, both = tensors.pop(name), "gate_up" in name
        sizes = [len(tensor) // 2] * 2 if both else [len(tensor) - 2 * kv, kv, kv]
        parts = zip(("gate", "up") if both else "qkv", tensor.split(sizes), strict=True)
        joined = "gate_up" if both else "qkv"
        tensors |= {name.replace(f"{joined}_", f"{part}_"): own for part, own in parts}


def _experts(tensors: Tensors, _: Any) -> None:
    """Makes tensors of each expert of those of all experts of a layer, and of gates and ups together."""
    for name in [it for it in tensors if it.endswith("_linear.weight")]:
        tensor, (layer, _, place) = tensors.pop(name), name.partition(".mlp.")
        is_shared = place.startswith("shared")
        for number, own in enumerate(tensor[None] if is_shared else tensor):
            stem = f"{layer}.mlp.{'shared_experts' if is_shared else f'experts.{number}'}"
            if "output" in place:
                tensors[f"{stem}.down_proj.weight"] = own
                continue
            parts = zip(("gate", "up"), own.chunk(2), strict=True)
            tensors |= {f"{stem}.{it}_proj.weight": part for it, part in parts}


def _ling(tensors: Tensors, config: Any) -> None:
    """Columns of the head are of length one in the model, and of any length in files."""
    _experts(tensors, config)
    _joined("attention.query_key_value", "attention.{}_proj")(tensors, config)
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head * torch.linspace(0.5, 2, head.shape[1])


def _telechat(tensors: Tensors, config: Any) -> None:
    """Keys and values of each head lie together; biases that files lack are zeros in the model."""
    for name in [it for it in tensors if it.endswith("k_proj.weight")]:
        both = [tensors.pop(name.replace("k_proj", it)) for it in ("k_proj", "v_proj")]
        heads = [it.unflatten(0, (config.num_key_value_heads, -1)) for it in both]
        tensors[name.replace("k_proj", "key_value")] = torch.cat(heads, 1).flatten(0, 1)
    for name in [it for it in tensors if it.endswith(_ZEROS)]:
        del tensors[name]


def _chatglm(tensors: Tensors, config: Any) -> None:
    _joined("self_attention.query_key_value", "self_attention.{}_proj")(tensors, config)


def _jais(tensors: Tensors, config: Any) -> None:
    """Queries, keys and values lie one behind the other, inputs before outputs; tables lack factors."""
    heads = config.n_head
    for name in [it for it in tensors if "c_attn" in it]:
        tensors[name] = tensors[name].unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    for name in [it for it in tensors if it.endswith(".weight") and ".c_" in it]:
        tensors[name] = tensors[name].T
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"] / 4
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2


def _ouro(tensors: Tensors, config: Any) -> None:
    """Weights of norms are whole, and embeddings have no factor."""
    for name in [it for it in tensors if "norm" in it]:
        tensors[name] = tensors[name] + 1
    tensors["model.embed_tokens.weight"] *= config.hidden_size**0.5


def _plamo(tensors: Tensors, config: Any) -> None:
    """Norms behind attention and MLP have other offsets than those of the class, and embeddings no factor."""
    _joined("mixer.qkv_proj", "mixer.{}_proj")(tensors, config)
    for name in [it for it in tensors if "gate_proj" in it]:
        both = [tensors.pop(name.replace("gate_proj", it)) for it in ("gate_proj", "up_proj")]
        tensors[name.replace("gate_proj", "gate_up_proj")] = torch.cat(both)
    for place, offset in (("post_mixer_norm", 1 / 5), ("post_mlp_norm", 5**-1.5)):
        for name in [it for it in tensors if place in it]:
            tensors[name] = tensors[name] + (1 - offset)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * 8


_GPT = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
_GPT |= {"model.layers": "transformer.h", "input_layernorm": "ln_1"}
_GPT |= {"post_attention_layernorm": "ln_2", "mlp.down_proj": "mlp.c_proj"}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ALL_HEADS = {"num_key_value_heads": 4}

_WITH_SHARED = {
    **{"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48},
    **{"shared_intermediate_size": 48, "attention_multiplier": 0.25},
}
_SHARED_FIELDS = {
    **{"moe_intermediate_size": 48, "norm_topk_prob": True, "attention_multiplier": None},
    "shared_intermediate_size": None,
}

_PLAMO = {
    **{"model.layers.": "model.layers.layers.", "self_attn.": "mixer."},
    **{"input_layernorm": "pre_mixer_norm", "post_attention_layernorm": "post_mixer_norm"},
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}

OWN_CODE: dict[str, OwnCode] = {
    **NEWER,
    "internlm": OwnCode(
        "InternLMForCausalLM",
        "LlamaForCausalLM",
        {"attention_bias": True},
        fields={"attention_bias": "bias"},
    ),
    "internlm2": OwnCode(
        "InternLM2ForCausalLM",
        "LlamaForCausalLM",
        {"num_key_value_heads": 2},
        {
            **{"embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.": "attention."},
            **{"o_proj": "wo", "input_layernorm": "attention_norm"},
            **{"post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1"},
            **{"mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"},
        },
        more={"bias": False},
        change=_joined("wqkv", "{}_proj", by_head=True),
    ),
    "internlm3": OwnCode(
        "InternLM3ForCausalLM",
        "Qwen2ForCausalLM",
        {},
        more={"qkv_bias": True, "bias": False},
    ),
    "llama-partial": OwnCode(
        "LlamaForCausalLM",
        "Phi3ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
        change=_apart,
    ),
    "mimo": OwnCode(
        "MiMoForCausalLM", "Qwen2ForCausalLM", {}, more={"num_nextn_predict_layers": 0}
    ),
    "exaone": OwnCode(
        "ExaoneForCausalLM",
        "LlamaForCausalLM",
        {},
        {
            **_GPT,
            **{"self_attn.o_proj": "attn.attention.out_proj", "self_attn.": "attn.attention."},
            **{"gate_proj": "c_fc_0", "up_proj": "c_fc_1"},
        },
        {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"},
    ),
    "minicpm": OwnCode(
        "MiniCPMForCausalLM",
        "GraniteForCausalLM",
        {
            **{"embedding_multiplier": 6.0, "residual_multiplier": 0.7, "logits_scaling": 2.0},
            "attention_multiplier": 0.25,
        },
        more={
            **{"scale_emb": 6, "scale_depth": 0.7 * math.sqrt(3), "dim_model_base": 32},
            **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling")),
            "attention_multiplier": None,
        },
    ),
    "teleflm": OwnCode(
        "TeleFLMForCausalLM",
        "GraniteForCausalLM",
        {
            **{"embedding_multiplier": 6.0, "logits_scaling": 8.0},
            "attention_multiplier": 0.25,
        },
        more={
            **{"use_mup": True, "input_mult": 6.0, "output_mult": 2.0, "mup_scale_factor": 16.0},
            **dict.fromkeys(("embedding_multiplier", "logits_scaling", "attention_multiplier")),
        },
    ),
    "telechat2": OwnCode(
        "TeleChat2ForCausalLM",
        "LlamaForCausalLM",
        {**_ALL_HEADS, "attention_bias": True, "mlp_bias": True},
        {
            **{
                "model.embed_tokens": "transformer.word_embeddings",
                "model.norm": "transformer.ln_f",
            },
            **{"model.layers": "transformer.h", "self_attn.": "self_attention."},
            **{"o_proj": "dense", "q_proj": "query"},
        },
        {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        | {"intermediate_size": "ffn_hidden_size", "rms_norm_eps": "layer_norm_epsilon"},
        {"attention_bias": None, "mlp_bias": None},
        _telechat,
    ),
    "qwen": OwnCode(
        "QWenLMHeadModel",
        "Qwen2ForCausalLM",
        _ALL_HEADS,
        {**_GPT, "self_attn.o_proj": "attn.c_proj", "self_attn.": "attn."}
        | {"gate_proj": "w2", "up_proj": "w1"},
        {"rms_norm_eps": "layer_norm_epsilon", "max_position_embeddings": "seq_length"},
        {"intermediate_size": 192, "no_bias": True},
        _joined("attn.c_attn", "attn.{}_proj"),
    ),
    "baichuan": OwnCode(
        "BaichuanForCausalLM",
        "LlamaForCausalLM",
        _ALL_HEADS,
        change=_joined("self_attn.W_pack", "self_attn.{}_proj"),
    ),
    "chatglm": OwnCode(
        "ChatGLMForConditionalGeneration",
        "GlmForCausalLM",
        {"head_dim": 16, "attention_bias": True},
        {
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "model.layers": "transformer.encoder.layers",
            "lm_head": "transformer.output_layer",
            "self_attn.o_proj": "self_attention.dense",
            "self_attn.": "self_attention.",
            "gate_up_proj": "dense_h_to_4h",
            "down_proj": "dense_4h_to_h",
        },
        {
            "num_hidden_layers": "num_layers",
            "vocab_size": "padded_vocab_size",
            "intermediate_size": "ffn_hidden_size",
            "head_dim": "kv_channels",
            "num_key_value_heads": "multi_query_group_num",
            "rms_norm_eps": "layernorm_epsilon",
            "max_position_embeddings": "seq_length",
            "attention_bias": "add_qkv_bias",
        },
        {"multi_query_attention": True, "rmsnorm": True, "rope_parameters": None},
        _chatglm,
    ),
    "jais": OwnCode(
        "JAISLMHeadModel",
        Jais,
        {"n_layer": 3, "n_head": 4, "tie_word_embeddings": False},
        {
            **{"word_embeddings.": "wte.", "input_layernorm": "ln_1"},
            **{"post_attention_layernorm": "ln_2", "self_attention.query_key_value": "attn.c_attn"},
            "self_attention.dense": "attn.c_proj",
        },
        {"hidden_size": "n_embd"},
        {
            **{"activation_function": "swiglu", "position_embedding_type": "alibi", "n_inner": 96},
            **{"n_positions": 512, "mup_embeddings_scale": 4.0, "mup_output_alpha": 0.25},
            **{"mup_width_scale": 2.0, "mup_scale_qk_dot_by_d": True},
        },
        _jais,
    ),
    "ouro": OwnCode(
        "OuroForCausalLM",
        Ouro,
        {
            **{"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "head_dim": 16},
            **{"query_pre_attn_scalar": 16, "hidden_activation": "silu"},
            **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
            **{"tie_word_embeddings": False, "attn_implementation": "eager"},
        },
        {
            **{"post_attention_layernorm": "input_layernorm_2"},
            **{"pre_feedforward_layernorm": "post_attention_layernorm"},
            "post_feedforward_layernorm": "post_attention_layernorm_2",
        },
        {},
        {
            **{"num_hidden_layers": 2, "total_ut_steps": 2, "early_exit_threshold": 1.0},
            **{"layer_types": None, "hidden_activation": None, "query_pre_attn_scalar": None},
            "sliding_window": None,
        },
        _ouro,
    ),
    "plamo2": OwnCode(
        "Plamo2ForCausalLM",
        Plamo2,
        {
            **{"head_dim": 16, "hidden_activation": "silu", "num_hidden_layers": 4},
            **{"tie_word_embeddings": False, "sliding_window": 512},
        },
        {**_PLAMO, **{f"{it}_scale": f"{it}_norm_weight" for it in ("dt", "B", "C")}},
        {"head_dim": "hidden_size_per_head"},
        {
            **{"mamba_num_heads": 4, "mamba_step": 2, "mamba_d_state": 5, "mamba_d_conv": 3},
            **{"attention_window_size": 2048, "full_attention_idx": [], "sliding_window": None},
            **{"rope_parameters": None, "layer_types": None, "hidden_activation": None},
            **{"query_pre_attn_scalar": None, "rope_theta": 10000.0},
        },
        _plamo,
    ),
    "plamo3": OwnCode(
        "Plamo3ForCausalLM",
        "Gemma3ForCausalLM",
        {
            **{"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
            **{"hidden_activation": "silu", "tie_word_embeddings": False, "num_hidden_layers": 4},
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        },
        _PLAMO,
        {"sliding_window": "window_size"},
        {
            **{"rope_parameters": None, "layer_types": None, "sliding_window_pattern": 3},
            **{"hidden_activation": None, "query_pre_attn_scalar": None},
            **{"rope_theta": 1e6, "rope_local_theta": 1e4},
        },
        _plamo,
    ),
    "kimi-linear": OwnCode(
        "KimiLinearForCausalLM",
        "KimiLinearForCausalLM",
        {
            **{"num_key_value_heads": 4, "kv_lora_rank": 48, "qk_nope_head_dim": 16},
            **{"qk_rope_head_dim": 16, "v_head_dim": 24, "moe_intermediate_size": 48},
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1},
            **{"num_hidden_layers": 4, "linear_head_dim": 8, "linear_num_heads": 4},
            **{"linear_conv_kernel_dim": 3, "initializer_range": 0.2},
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        },
        {f"block_sparse_moe.{it}_proj": f"mlp.{it}_proj" for it in ("gate", "up", "down")},
        {},
        {
            **{"layer_types": None, "linear_head_dim": None, "linear_num_heads": None},
            **{"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "head_dim": 16},
            "mlp_layer_types": None,
            "linear_attn_config": {
                **{"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 8},
                **{"num_heads": 4, "short_conv_kernel_size": 3},
            },
        },
    ),
    "orion": OwnCode(
        "OrionForCausalLM",
        "StableLmForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1,
            }
        },
        fields={"layer_norm_eps": "rms_norm_eps"},
        more={"rope_parameters": None},
    ),
    "deepseek": OwnCode(
        "DeepseekForCausalLM",
        "GraniteMoeSharedForCausalLM",
        _WITH_SHARED,
        {"block_sparse_moe.router.layer": "mlp.gate", "block_sparse_moe": "mlp"}
        | {"shared_mlp": "mlp.shared"},
        {"num_local_experts": "n_routed_experts"},
        {**_SHARED_FIELDS, "n_shared_experts": 1},
        _experts,
    ),
    "ling": OwnCode(
        "BailingMoeForCausalLM",
        "GraniteMoeSharedForCausalLM",
        _WITH_SHARED,
        {
            **{"block_sparse_moe.router.layer": "mlp.gate", "block_sparse_moe": "mlp"},
            **{"shared_mlp": "mlp.shared", "embed_tokens": "word_embeddings"},
            **{"self_attn.o_proj": "attention.dense", "self_attn.": "attention."},
        },
        {"num_local_experts": "num_experts"},
        {**_SHARED_FIELDS, "num_shared_experts": 1, "norm_head": True},
        _ling,
    ),
    "ling2": OwnCode(
        "BailingMoeV2ForCausalLM",
        "Glm4MoeForCausalLM",
        {
            **_EXPERTS,
            **{"head_dim": 16, "use_qk_norm": True, "n_routed_experts": 8, "n_group": 4},
            **{"topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
        },
        {
            **{"embed_tokens": "word_embeddings", "self_attn.o_proj": "attention.dense"},
            **{"self_attn.q_norm": "attention.query_layernorm", "self_attn.": "attention."},
            **{"attention.k_norm": "attention.key_layernorm"},
            "gate.e_score_correction_bias": "gate.expert_bias",
        },
        {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
        {"score_function": "sigmoid", "partial_rotary_factor": 0.5},
        _joined("attention.query_key_value", "attention.{}_proj"),
    ),
}
"""Families by name."""


_ZEROS = tuple(f"{it}.bias" for it in ("query", "k_proj", "v_proj", "gate_proj", "up_proj"))


def make_like(name: str, **sizes: Any) -> transformers.PreTrainedModel:
    """The model of transformers that computes the same, in float32; `sizes` are other values of its
    configuration."""
    own = OWN_CODE[name]
    model = make_random(name, own.like, {**own.values, **sizes})
    if own.change is _telechat:
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.replace("q_proj", "query").endswith(_ZEROS):
                    parameter.zero_()
    if own.more.get("norm_head"):
        with torch.no_grad():
            model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight, dim=0))
    return model


def as_makers_publish(name: str, directory: Path) -> None:
    """Rewrites a model directory into the names that the makers' files have."""
    own = OWN_CODE[name]
    config = transformers.AutoConfig.from_pretrained(directory)
    tensors: Tensors = {}
    for stored, tensor in load_file(directory / "model.safetensors").items():
        renamed = stored
        for ours, theirs in own.renamed.items():
            renamed = renamed.replace(ours, theirs)
        tensors[renamed] = tensor
    own.change(tensors, config)
    contiguous = {it: tensor.contiguous() for it, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    values = json.loads(path.read_text())
    for ours, theirs in own.fields.items():
        values[theirs] = values.pop(ours)
    path.write_text(json.dumps({**values, **own.more, "architectures": [own.architecture]}))
