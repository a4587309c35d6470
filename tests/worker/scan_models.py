# SPDX-License-Identifier: Apache-2.0
"""Sizes of tiny models with Mamba layers: a line for each."""

from __future__ import annotations

from typing import Any

_MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}
_MAMBA2 = {
    "num_hidden_layers": 4,
    "hidden_size": 80,
    "mamba_n_heads": 8,
    "mamba_d_head": 10,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_expand": 1,
    "num_key_value_heads": 4,
}
_MAMBA = {
    "hidden_size": 80,
    "intermediate_size": 176,
    "state_size": 6,
    "conv_kernel": 3,
    "time_step_rank": 7,
}
_NO_LEAST_STEP = {"time_step_min": 1e-9}
"""transformers brings steps of Nemotron-H up to this in prompts alone, which makers' code and vLLM never do."""
_GRANITE4_H = {
    **_MULTIPLIERS,
    **_MAMBA2,
    "mamba_n_groups": 1,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
}

NEVER_ONE_LAYER = frozenset(
    {"granite4-h", "granite4-h-moe", "bamba", "jamba", "hybrid-nemotron"}
    | {"zamba2", "zamba2-plain", "minimax", "hybrid-nemotron-latent"}
)
"""Hybrids of which transformers computes nothing where all layers are scans."""
SCANS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite4-h": ("GraniteMoeHybridForCausalLM", _GRANITE4_H),
    "granite4-h-moe": ("GraniteMoeHybridForCausalLM", {**_GRANITE4_H, **_EXPERTS}),
    "bamba": ("BambaForCausalLM", {**_MAMBA2, "attn_layer_indices": [1], "mamba_proj_bias": True}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"hidden_size": 80, "num_heads": 8, "head_dim": 20, "n_groups": 2, "state_size": 4},
    ),
    "mamba": ("MambaForCausalLM", _MAMBA),
    "falcon-mamba": ("FalconMambaForCausalLM", {**_MAMBA, "use_bias": True}),
    "jamba": (
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 5,
            "num_key_value_heads": 4,
            "mamba_d_state": 5,
            "mamba_d_conv": 3,
            "mamba_expand": 1,
            "mamba_dt_rank": 7,
        },
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        {
            **_MAMBA2,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 72,
            "mamba_d_head": 9,
            "mamba_rms_norm": True,
            "lm_head_multiplier": 0.4,
            "embedding_multiplier": 5.0,
            "mlp_multipliers": [0.8, 0.6],
            "ssm_multipliers": [0.9, 0.5, 0.7, 1.2, 0.6],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.7,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {
            **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48},
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
            **{"full_attn_alpha_factor": 1.7, "full_attn_beta_factor": 0.8, "block_size": 16},
            **{"linear_attn_alpha_factor": 1.4, "linear_attn_beta_factor": 1.2},
            **{
                "mlp_alpha_factor": 1.5,
                "mlp_beta_factor": 0.9,
                "head_dim": 8,
                "initializer_range": 0.2,
            },
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            **{"hidden_size": 80, "num_hidden_layers": 7, "num_key_value_heads": 4},
            "layers_block_type": [
                *("linear_attention", "hybrid", "hybrid", "linear_attention"),
                *("hybrid", "hybrid", "linear_attention"),
            ],
            **{"n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 5, "mamba_d_conv": 3},
            **{
                "mamba_expand": 1,
                "num_mem_blocks": 2,
                "adapter_rank": 6,
                "initializer_range": 0.1,
                "use_mem_rope": True,
            },
            "use_shared_attention_adapter": True,
        },
    ),
    "zamba2-plain": (
        "Zamba2ForCausalLM",
        {
            **{"hidden_size": 80, "num_hidden_layers": 4, "num_key_value_heads": 2},
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
            **{"n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_d_state": 5, "mamba_d_conv": 3},
            **{
                "mamba_expand": 1,
                "num_mem_blocks": 2,
                "adapter_rank": 6,
                "initializer_range": 0.15,
            },
        },
    ),
    "hybrid-nemotron-latent": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
            **{"num_hidden_layers": None, "num_key_value_heads": 4, "head_dim": 20},
            **{"mamba_num_heads": 6, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 5},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_latent_size": 40},
            **{"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 72},
            **_NO_LEAST_STEP,
        },
    ),
    "hybrid-nemotron": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": [
                "mamba",
                "mlp",
                "mamba",
                "attention",
                "mamba",
                "moe",
                "attention",
                "moe",
            ],
            "num_hidden_layers": None,
            "num_key_value_heads": 4,
            "head_dim": 20,
            "mamba_num_heads": 6,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 5,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "routed_scaling_factor": 1.7,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 72,
            **_NO_LEAST_STEP,
        },
    ),
}
"""Families, as in `family_models.FAMILIES`."""
