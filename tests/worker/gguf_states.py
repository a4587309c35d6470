# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp's converter says of families whose layers keep states, and what it does to their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gguf_changes import Config, Named, corrected, permuted, rotated, scanned, sigmoids
from torch import Tensor


def mamba(config: Config) -> Mapping[str, Any]:
    zeros = ("feed_forward_length", "attention.head_count")
    inner = config.get("intermediate_size") or 2 * config["hidden_size"]
    if config["model_type"] == "mamba2":
        inner = config["num_heads"] * config["head_dim"]
    return {
        **dict.fromkeys(zeros, 0),
        **dict.fromkeys(("attention.head_count_kv", "attention.key_length"), None),
        "attention.value_length": None,
        "attention.layer_norm_epsilon": None,
        "context_length": 2**20,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": inner,
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config.get("num_heads") or config["time_step_rank"],
        **({"ssm.group_count": config["n_groups"]} if "n_groups" in config else {}),
        **({"ssm.dt_b_c_rms": True} if config["model_type"] == "falcon_mamba" else {}),
    }


def hybrid(config: Config) -> dict[str, Any]:
    """Mamba layers beside others, by fields that begin with `mamba_`."""
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    rank = config.get("mamba_dt_rank") or config["mamba_n_heads"]
    found = {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": inner,
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": rank,
    }
    if "mamba_n_groups" in config:
        found["ssm.group_count"] = config["mamba_n_groups"]
    return found


def jamba(config: Config) -> Mapping[str, Any]:
    first, every = config["attn_layer_offset"], config["attn_layer_period"]
    heads = config["num_key_value_heads"]
    attending = range(first, config["num_hidden_layers"], every)
    counts = [heads * (layer in attending) for layer in range(config["num_hidden_layers"])]
    return {**hybrid(config), "attention.head_count_kv": counts}


def nemotron(config: Config) -> Mapping[str, Any]:
    short = {"linear_attention": "mamba", "full_attention": "attention"}
    kinds = [short.get(kind, kind) for kind in config["layers_block_type"]]
    is_sparse = "moe" in kinds
    sizes = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    heads, inner = config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]
    found = {
        "block_count": len(kinds),
        "attention.head_count_kv": [
            config["num_key_value_heads"] * (kind == "attention") for kind in kinds
        ],
        "feed_forward_length": [sizes.get(kind, 0) for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.layer_norm_epsilon": None,
        "attention.key_length": config["head_dim"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": inner,
        "ssm.state_size": config["ssm_state_size"],
        "ssm.time_step_rank": heads,
        "ssm.group_count": config["n_groups"],
    }
    if not is_sparse:
        gone = ("expert_count", "expert_used_count", "expert_group_count")
        return found | dict.fromkeys((*gone, "expert_group_used_count"))
    return found | {
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
    }


def latent(config: Config) -> Mapping[str, Any]:
    return {**nemotron(config), "moe_latent_size": config["moe_latent_size"]}


def bamba(config: Config) -> Mapping[str, Any]:
    heads, layers = config["num_key_value_heads"], range(config["num_hidden_layers"])
    attending = config["attn_layer_indices"]
    return {
        **hybrid(config),
        "attention.head_count_kv": [heads * (layer in attending) for layer in layers],
        "rope.dimension_count": rotated(config),
        "rope.scaling.finetuned": True,
    }


def permuted_and_scanned(name: str, values: Tensor, config: Config) -> Iterator[Named]:
    for changed, own in permuted(name, values, config):
        yield from scanned(changed, own, config)


def kimi(config: Config) -> Mapping[str, Any]:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    attending = [int(kind == "full_attention") for kind in config["layer_types"]]
    return {
        **sigmoids({**config, "head_dim": rotary, "rope_parameters": {}}),
        "expert_used_count": config["num_experts_per_token"],
        "leading_dense_block_count": 0,
        "attention.head_count_kv": attending,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": None,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_shared_feed_forward_length": None,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "context_length": config["model_max_length"],
    }


def channels(name: str, values: Tensor, config: Config) -> Iterator[Named]:
    """Convolutions in four dimensions, and decays as factors."""
    if "_conv1d" in name:
        values = values.reshape(1, len(values), 1, -1)
    if name.endswith(".A_log"):
        values = -values.exp()
    yield from corrected(name.replace(".dt_bias", ".dt_proj.bias"), values, config)


def plamo2(config: Config) -> Mapping[str, Any]:
    layers = range(config["num_hidden_layers"])
    kv, heads = config["num_key_value_heads"], config["num_attention_heads"]
    size = config["hidden_size_per_head"]
    return {
        "attention.head_count": [heads * (at % 2) for at in layers],
        "attention.head_count_kv": [kv * (at % 2) for at in layers],
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": config["rope_theta"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * size,
        "ssm.group_count": 0,
    }


def offset(name: str, values: Tensor, _: Config) -> Iterator[Named]:
    """Norms with their offsets, and decays as factors."""
    offsets = {"post_mixer_norm.weight": 1 / 5, "post_mlp_norm.weight": 5**-1.5}
    if name.endswith("norm.weight"):
        values = values + next((it for end, it in offsets.items() if name.endswith(end)), 1.0)
    if name.endswith(".A_log"):
        values = -values.exp()
    for own in ("dt_norm", "B_norm", "C_norm", "k", "q"):
        name = name.replace(f".{own}_weight", f".{own}.weight")
    yield name.replace(".dt_bias", ".dt_proj.bias"), values
