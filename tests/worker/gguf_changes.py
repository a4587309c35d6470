# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp's converter does to tensors of families, and the metadata that it writes of most of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
Named = tuple[str, Tensor]
_COMMON = {
    "block_count": ("n_layers", "num_hidden_layers", "n_layer", "num_layers"),
    "context_length": ("max_position_embeddings", "n_ctx", "n_positions", "max_seq_len"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
}
"""Keys that the converter writes of most families, with the fields that it takes them of."""


def common(config: Config) -> dict[str, Any]:
    """Values of the keys that most families have."""
    found = {
        key: next((config[it] for it in names if config.get(it) is not None), None)
        for key, names in _COMMON.items()
    }
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    local = rope.get("sliding_attention", {})
    found["rope.freq_base"] = full.get("rope_theta")
    found["rope.freq_base_swa"] = local.get("rope_theta")
    found["rope.scaling.type"] = "none" if full.get("rope_type") == "default" else None
    return {key: value for key, value in found.items() if value is not None}


def head_dim(config: Config) -> int:
    values = common(config)
    size: int = config.get("head_dim") or (
        values["embedding_length"] // values["attention.head_count"]
    )
    return size


def rotated(config: Config) -> int:
    """Dimensions of a head that turn."""
    return int(head_dim(config) * config["rope_parameters"].get("partial_rotary_factor", 1))


def rotations(config: Config) -> Mapping[str, Any]:
    return {"rope.dimension_count": rotated(config), "vocab_size": config["vocab_size"]}


def sigmoids(config: Config) -> Mapping[str, Any]:
    """Experts scored by sigmoids, as several families have them."""
    inner, shared = config["moe_intermediate_size"], config.get("n_shared_experts") or 1
    return {
        **rotations(config),
        "expert_count": config.get("num_experts") or config["n_routed_experts"],
        "expert_feed_forward_length": inner,
        "expert_shared_count": config.get("num_shared_experts") or shared,
        "expert_shared_feed_forward_length": inner,
        "expert_weights_norm": config.get("norm_topk_prob", True),
        "expert_weights_scale": config.get("routed_scaling_factor") or config["route_scale"],
        "expert_gating_func": 2,
        "leading_dense_block_count": config.get("num_dense_layers")
        or config.get("first_k_dense_replace", 1),
    }


def neighbours(values: Tensor, heads: int) -> Tensor:
    """Rows of a head in the order that ggml rotates: `i` beside `i + d/2`."""
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)


def permuted(name: str, values: Tensor, config: Config) -> Iterator[Named]:
    """Queries and keys of heads that are rotated by neighbours."""
    usual = common(config)
    heads = usual["attention.head_count"]
    if "q_proj" in name:
        values = neighbours(values, heads)
    if "k_proj" in name:
        values = neighbours(values, usual.get("attention.head_count_kv", heads))
    yield name, values


def by_kind(name: str, values: Tensor, config: Config) -> Iterator[Named]:
    """Queries, keys and values one behind the other, where they took turns by heads of keys."""
    if config["model_type"] == "bloom":
        name = name.removeprefix("transformer.")
    if "query_key_value" in name:
        heads = common(config)["attention.head_count"]
        groups = values.unflatten(0, (-1, head_dim(config)))
        kv_heads = (len(groups) - heads) // 2
        groups = groups.unflatten(0, (kv_heads, -1))
        parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
        values = torch.cat([it.flatten(0, 2) for it in parts])
    yield name, values


def turned(name: str, values: Tensor, _: Config) -> Iterator[Named]:
    """Outputs before inputs."""
    yield (
        name,
        values.t()
        if name.endswith((".c_attn.weight", ".c_fc.weight", ".c_proj.weight"))
        else values,
    )


def corrected(name: str, values: Tensor, _: Config) -> Iterator[Named]:
    """Numbers that are added to scores of experts have a name like a bias."""
    for end in ("e_score_correction_bias", "expert_bias"):
        if name.endswith(end):
            name = f"{name.removesuffix('_bias')}.bias" if "score" in end else f"{name}.bias"
    yield name, values


def one_by_one(name: str, values: Tensor, config: Config) -> Iterator[Named]:
    """Experts of DBRX in a dimension of their own, with inputs behind."""
    if "experts.mlp" in name:
        values = values.unflatten(0, (config["ffn_config"]["moe_num_experts"], -1))
        values = values.transpose(1, 2) if name.endswith("w2") else values
        name += ".weight"
    yield name, values


def scanned(name: str, values: Tensor, config: Config) -> Iterator[Named]:
    """Decays as factors, and vectors of Mamba-2 as matrices."""
    of_heads = config["model_type"] not in ("mamba", "falcon_mamba", "jamba")
    if name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith(".A_log"):
        values = -values.exp()
    if of_heads and name.endswith((".A_log", ".D")):
        values = values[:, None]
    if of_heads and name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        groups = config.get("n_groups") or config["mamba_n_groups"]
        values = values.unflatten(0, (groups, -1))
    if config["model_type"] == "jamba":
        name = name.replace("layers.", "model.layers.").replace("model.model", "model")
        name = name.replace("feed_forward.experts", "mlp.experts")
    if "mixer.experts." in name:
        name = name.replace("backbone", "model").replace("mixer.experts", "mlp.experts")
    yield from corrected(name, values, config)


def multiplied(name: str, values: Tensor, config: Config) -> Iterator[Named]:
    """Falcon-H1's multipliers, which become part of weights."""
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "mamba.out_proj": config["ssm_out_multiplier"],
        "mamba.in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    values = values * next((it for part, it in factors.items() if part in name), 1.0)
    if "mamba.in_proj" in name:
        inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = values.split([inner, inner, keys, keys, config["mamba_n_heads"]])
        values = torch.cat([p * it for p, it in zip(parts, config["ssm_multipliers"], strict=True)])
    yield from scanned(name, values, config)


def weighed(name: str, values: Tensor, _: Config) -> Iterator[Named]:
    """Factors have names like weights; those of experts have the names of what they count for."""
    if name.endswith(("output_scale", "layer_scalar")):
        name += ".weight"
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("router.scale"):
        name = f"{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        name = f"{layer}.ffn_down_exps.scale"
    if ".experts." in name:
        name += ".weight"
    yield name, values
