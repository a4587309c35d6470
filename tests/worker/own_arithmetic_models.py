# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of families with arithmetic that no other one has: a line for each, as in `family_models`."""

from __future__ import annotations

from typing import Any

_LAYER_INPUTS = {
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 320,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
_GEMMA3N = {
    **_LAYER_INPUTS,
    "head_dim": 24,
    "laurel_rank": 8,
    "altup_num_inputs": 3,
    "intermediate_size": [96, 96, 80, 80, 96, 64],
    "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0, 0.0, 0.0],
    "vocab_size_per_layer_input": 300,
}
_GEMMA4 = {
    **_LAYER_INPUTS,
    **{"head_dim": 16, "global_head_dim": 40, "use_double_wide_mlp": True},
    "final_logit_softcapping": 10.0,
    "initializer_range": 0.2,
}
_PHIMOE = {
    **{"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48},
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.2, "long_mscale": 1.4},
        "original_max_position_embeddings": 256,
        "short_factor": [1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0],
        "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0],
    },
}

OWN_ARITHMETIC: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("Gemma3nForCausalLM", _GEMMA3N),
    "gemma4": ("Gemma4ForCausalLM", _GEMMA4),
    "gemma4-plain": (
        "Gemma4ForCausalLM",
        {
            **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
            **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 24},
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4-moe": (
        "Gemma4ForCausalLM",
        {
            **{"head_dim": 16, "global_head_dim": 24, "hidden_size_per_layer_input": 0},
            **{"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48},
            **{"enable_moe_block": True, "sliding_window": 24},
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "mimo-v2": (
        "MiMoV2FlashForCausalLM",
        {
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            **{"head_dim": 24, "v_head_dim": 16, "sliding_window": 25, "num_key_value_heads": 1},
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "mistral4": (
        "Mistral4ForCausalLM",
        {
            **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32},
            **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
            **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
            "routed_scaling_factor": 1.7,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0},
                **{"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                **{"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1},
                "partial_rotary_factor": 1 / 3,
            },
        },
    ),
    "longcat-flash": (
        "LongcatFlashForCausalLM",
        {
            **{"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 24},
            **{"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48},
            **{"moe_topk": 3, "zero_expert_num": 3, "n_routed_experts": 6, "head_dim": 8},
            "qk_rope_head_dim": 8,
            **{"num_hidden_layers": 4, "routed_scaling_factor": 1.7},
        },
    ),
    "phimoe": ("PhimoeForCausalLM", {**_PHIMOE, "lm_head_bias": True, "router_jitter_noise": 0.3}),
    "dbrx": (
        "DbrxForCausalLM",
        {
            **{"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512},
            "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2},
        },
    ),
}
"""Class in transformers and values that are not those of `family_models`, by name."""
