# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that change the arithmetic of some family, each refused where another family has it.

The names are those of configuration classes of transformers. A key that is in no list here, and that no family
reads, is of training, of other tasks or of other programs, and leaves the arithmetic as it is.
"""

from __future__ import annotations

from collections.abc import Set

from pagoda.checkpoints.fields import Fields

_SWITCHES = (
    # Attention.
    *("alibi", "use_alibi", "attention_chunk_size", "attention_k_eq_v", "attention_out_bias"),
    *(
        "attn_logit_softcapping",
        "attn_temperature_tuning",
        "clip_qkv",
        "dual_chunk_attention_config",
    ),
    *("index_topk", "kv_lora_rank", "layer_rope_theta", "no_rope_layer_interval", "no_rope_layers"),
    *("num_kv_shared_layers", "q_lora_rank", "qk_layernorm", "qkv_bias", "query_pre_attn_scalar"),
    *(
        "llama_4_scaling",
        "rope_interleave",
        "scale_attn_by_inverse_layer_idx",
        "use_attention_gate",
    ),
    *("use_bidirectional_attention", "use_mrope", "use_qk_norm", "use_qkv_bias"),
    # Blocks and what surrounds them.
    *("activation_sparsity_pattern", "add_bias_linear", "apply_residual_connection_post_layernorm"),
    *(
        "attn_layer_indices",
        "final_logit_softcapping",
        "full_attn_idxs",
        "hidden_size_per_layer_input",
    ),
    *("lm_head_bias", "logits_soft_cap", "mlp_bias", "output_logit_soft_cap", "parallel_attn"),
    *("use_parallel_residual", "use_post_norm", "use_sandwich_norm"),
    # MLPs and experts.
    *("enable_moe_block", "first_k_dense_replace", "gate_soft_cap", "mlp_gate_softcap"),
    *(
        "mlp_up_softcap",
        "moe_num_experts",
        "moe_num_shared_experts",
        "moe_router_logit_softcapping",
    ),
    *(
        "n_routed_experts",
        "n_shared_experts",
        "num_dense_layers",
        "num_experts",
        "num_local_experts",
    ),
    *("num_shared_experts", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("swiglu_alpha", "swiglu_limit", "use_expert_bias", "zero_expert_num"),
)
"""Keys that mean nothing where they are absent, null, false, 0 or empty."""
_FACTORS = (
    *("attention_in_multiplier", "attention_multiplier", "attention_out_multiplier"),
    *("attention_value_scale", "embedding_multiplier", "embedding_scale", "key_multiplier"),
    *(
        "lm_head_multiplier",
        "logit_scale",
        "logits_scaling",
        "moe_routed_scaling_factor",
        "n_group",
    ),
    *("residual_multiplier", "route_scale", "routed_scaling_factor", "router_scaling_factor"),
    *("scale_depth", "scale_emb", "topk_group"),
)
"""Keys that mean nothing where they are absent, null or 1."""
_USUAL = {"scoring_func": "softmax", "topk_method": "greedy"}
"""Keys that mean nothing where they are absent, null or this."""

_TEMPERATURE = "llama_4_scaling_beta"
"""Key of rotary tables that is 0 where queries are not scaled by their positions."""


def refuse_other_arithmetic(fields: Fields, known: Set[str]) -> None:
    """Refuses keys that would change the arithmetic, but those that are `known` to the family.
    Raises ConfigError: there is one."""
    for name in _SWITCHES:
        if name not in known and (value := fields.values.get(name)):
            fields.require(name, type(value)())
    for name in _FACTORS:
        if name not in known:
            fields.require(name, 1)
    for name, neutral in _USUAL.items():
        if name not in known:
            fields.require(name, neutral)
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.table(name)
        if rope is not None and _TEMPERATURE not in known:
            rope.require(_TEMPERATURE, 0)
