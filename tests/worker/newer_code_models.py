# SPDX-License-Identifier: Apache-2.0
"""Tiny models of families with code and arithmetic of their own, as in `own_code_models`: a line for each."""

from __future__ import annotations

from typing import Any

from own_code import OwnCode, Tensors
from own_oracles import DECI_BLOCKS, SOLAR_LISTS, Arctic, Deci, Solar, Step


def _large3(tensors: Tensors, _: Any) -> None:
    """Makes tensors of each expert of those of all experts of a layer."""
    for name in [it for it in tensors if it.endswith("experts.gate_w3")]:
        stem, both = name.removesuffix("gate_w3"), tensors.pop(name)
        parts = {
            "w1": both.chunk(2, 1)[0],
            "w3": both.chunk(2, 1)[1],
            "w2": tensors.pop(f"{stem}w2"),
        }
        for part, stacked in parts.items():
            tensors |= {f"{stem}{i}.{part}.weight": own for i, own in enumerate(stacked)}


def _step(tensors: Tensors, _: Any) -> None:
    """Gates and ups of all experts of a layer have a tensor each."""
    for name in [it for it in tensors if it.endswith("experts.gate_up_proj")]:
        stem = name.removesuffix("experts.gate_up_proj")
        both = zip(("gate", "up"), tensors.pop(name).chunk(2, 1), strict=True)
        tensors |= {f"{stem}{it}_proj.weight": part for it, part in both}
        tensors[f"{stem}down_proj.weight"] = tensors.pop(f"{stem}experts.down_proj")


def _deci(tensors: Tensors, _: Any) -> None:
    """Parts of layers that are not there have no norms."""
    for index, block in enumerate(DECI_BLOCKS):
        for part, norm in (("attention", "input"), ("ffn", "post_attention")):
            if block[part].get("no_op"):
                del tensors[f"model.layers.{index}.{norm}_layernorm.weight"]


_MAPS = ("gate", "up", "down")
_STEP_KINDS = [
    *("full_attention", "sliding_attention", "sliding_attention", "full_attention"),
    "sliding_attention",  # of the layer that predicts one more token
]
_LARGE3_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0},
    **{"original_max_position_embeddings": 32, "partial_rotary_factor": 1 / 3},
}

NEWER: dict[str, OwnCode] = {
    "deci": OwnCode(
        "DeciLMForCausalLM",
        Deci,
        {"num_hidden_layers": 6},
        more={"block_configs": DECI_BLOCKS, "num_key_value_heads": None, "intermediate_size": None},
        change=_deci,
    ),
    "mistral-large3": OwnCode(
        "MistralLarge3ForCausalLM",
        "Mistral4ForCausalLM",
        {
            **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32},
            **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24},
            **{"moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 3},
            **{"first_k_dense_replace": 1, "rope_parameters": _LARGE3_ROPE},
        },
        {
            **{"model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output"},
            **{"self_attn.q_": "attention.wq_", "self_attn.kv": "attention.wkv"},
            **{"_proj_with": "_with", "a_proj": "a", "b_proj": "b", "wq_a_layer": "q_a_"},
            **{"wkv_a_layer": "kv_a_", "self_attn.o_proj": "attention.wo"},
            **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
            **{"mlp.gate.": "gate.", "mlp.experts": "experts", "mlp.shared": "shared"},
            **{"mlp.": "feed_forward.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        },
        more={
            "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 32},
            "rope_parameters": {**_LARGE3_ROPE, "llama_4_scaling_beta": None},
        },
        change=_large3,
    ),
    "step": OwnCode(
        "Step3p5ForCausalLM",
        Step,
        {
            **{"num_hidden_layers": 4, "head_dim": 16, "num_sliding_attention_heads": 6},
            "pad_token_id": 0,
            **{"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
            **{"mlp_layer_types": ["dense", *["sparse"] * 3], "sliding_window": 24},
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            **{"share_expert_dim": 64, "moe_router_scaling_factor": 1.7, "rms_norm_eps": 1e-5},
            **{"swiglu_limits": [0, 0, 1.5, 1.0], "swiglu_limits_shared": [1.25, 0, 1.0, 0]},
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "llama3", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                    **{"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0},
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            **{"mlp.gate.e_score_correction_bias": "moe.router_bias", "mlp.gate.": "moe.gate."},
            **{"mlp.experts": "moe.experts", "mlp.shared_experts": "share_expert"},
        },
        {"num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts"}
        | {"num_experts_per_tok": "moe_top_k"},
        {
            **{"num_sliding_attention_heads": None, "mlp_layer_types": None},
            **{"attention_other_setting": {"num_attention_heads": 6}, "moe_layers_enum": "1,2,3"},
            **{"num_nextn_predict_layers": 1, "layer_types": _STEP_KINDS, "rope_parameters": None},
            **{"rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4], "yarn_only_types": ["full_attention"]},
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 32.0, "original_max_position_embeddings": 64},
            },
        },
        _step,
    ),
    "arctic": OwnCode(
        "ArcticForCausalLM",
        Arctic,
        {"num_hidden_layers": 4, "num_local_experts": 5, "num_experts_per_tok": 2},
        {
            "residual.block_sparse_moe": "residual_mlp",
            **{f"block_sparse_moe.{it}_proj": f"block_sparse_moe.mlp.{it}_proj" for it in _MAPS},
            **{"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        },
        more={"use_residual": True, "parallel_attn_mlp_res": True, "moe_layer_frequency": 2},
    ),
    "solar": OwnCode("SolarForCausalLM", Solar, {"num_hidden_layers": 6}, more=SOLAR_LISTS),
}
