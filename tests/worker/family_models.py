# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of families beyond those of `tiny_models`: a line for each, all shapes a few kilobytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from own_arithmetic_models import OWN_ARITHMETIC
from scan_models import SCANS

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0],
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PART_OF_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.25, 1.5, 1.75, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 12.0],
}
_ROPE_BY_KIND = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
_YARN_BY_KIND = {
    "full_attention": {
        "rope_type": "yarn",
        "attention_factor": 1.2079441541679836,
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
_GEMMA = {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
_CAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 2.5}
_MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 3.0,
}
_NO_STATE = {
    "layer_types": ["full_attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "position_embedding_type": "rope",
    "mamba_n_heads": 8,
}
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 48,
}
_DELTA_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_QWEN3_5 = {name: size for name, size in _DELTA.items() if "expert" not in name}
_QWEN3_5_MOE = {**_DELTA, **_DELTA_EXPERTS, "intermediate_size": None}
_QWEN2_MOE = {
    "num_hidden_layers": 4,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}
_GPT_OSS = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
_QWEN3_VL_MOE = {
    "head_dim": 24,
    "num_attention_heads": 6,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
_EXAONE4 = {"sliding_window": 24, "sliding_window_pattern": 2}
_LFM2 = {
    "num_hidden_layers": 6,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    "block_multiple_of": 32,
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
}
_MINISTRAL3 = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_GLM4_MOE = {
    "head_dim": 16,
    "attention_bias": True,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "num_nextn_predict_layers": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}
_V2_LITE: dict[str, Any] = {
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
_KIMI_K2: dict[str, Any] = {
    **_LATENT,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {**_V2_LITE["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0},
}
_INDEX: dict[str, Any] = {
    **_LATENT,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 24,
    "index_head_dim": 20,
    "index_n_heads": 12,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
_HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SIGMOIDS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
}
_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3-windowed": ("Phi3ForCausalLM", {"sliding_window": 24}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 256},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
    "glm": ("GlmForCausalLM", {"head_dim": 16}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16}),
    "exaone4": ("Exaone4ForCausalLM", _EXAONE4),
    "exaone4-full": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "seed-oss": ("SeedOssForCausalLM", {"head_dim": 16, "mlp_bias": True}),
    "ministral": (
        "MinistralForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "phi4-mini": (
        "Phi3ForCausalLM",
        {"rope_parameters": _PART_OF_LONGROPE, "original_max_position_embeddings": 256},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**_GEMMA, "attn_implementation": "eager"}),
    "gemma2-scale": (
        "Gemma2ForCausalLM",
        {**_GEMMA, **_CAPS, "attn_implementation": "eager", "query_pre_attn_scalar": 24},
    ),
    "gemma3": ("Gemma3ForCausalLM", {**_GEMMA, "num_hidden_layers": 6}),
    "gemma3-scale": (
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            **_CAPS,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _ROPE_BY_KIND,
        },
    ),
    "granite": ("GraniteForCausalLM", _MULTIPLIERS),
    "granite4": ("GraniteMoeHybridForCausalLM", {**_MULTIPLIERS, **_NO_STATE}),
    "granite4-nope": (
        "GraniteMoeHybridForCausalLM",
        {**_MULTIPLIERS, **_NO_STATE, "position_embedding_type": None},
    ),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 24, "num_hidden_layers": 4}),
    "olmo3-yarn": (
        "Olmo3ForCausalLM",
        {"sliding_window": 24, "num_hidden_layers": 4, "rope_parameters": _YARN_BY_KIND},
    ),
    "qwen2-moe": ("Qwen2MoeForCausalLM", _QWEN2_MOE),
    "qwen2-moe-mixed": (
        "Qwen2MoeForCausalLM",
        {**_QWEN2_MOE, "decoder_sparse_step": 2, "norm_topk_prob": True, "num_experts_per_tok": 3},
    ),
    "granite-moe": ("GraniteMoeForCausalLM", {**_MULTIPLIERS, **_EXPERTS}),
    "granite-moe-shared": (
        "GraniteMoeSharedForCausalLM",
        {**_MULTIPLIERS, **_EXPERTS, "shared_intermediate_size": 80},
    ),
    "granite4-moe": ("GraniteMoeHybridForCausalLM", {**_MULTIPLIERS, **_NO_STATE, **_EXPERTS}),
    "glm4-moe": ("Glm4MoeForCausalLM", _GLM4_MOE),
    "glm4-moe-groups": (
        "Glm4MoeForCausalLM",
        {
            **_GLM4_MOE,
            "attention_bias": False,
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2ForCausalLM", {**_LATENT, **_V2_LITE}),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        {
            **_LATENT,
            "first_k_dense_replace": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**_KIMI_K2, "n_group": 4, "topk_group": 2}),
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", {**_INDEX, "n_group": 4, "topk_group": 2}),
    "glm-5": ("GlmMoeDsaForCausalLM", _INDEX),
    "moonlight": (
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "rms_norm_eps": 1e-5,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLiteForCausalLM",
        {**_LATENT, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    ),
    "glm4-moe-lite-mixed": (
        "Glm4MoeLiteForCausalLM",
        {
            **_LATENT,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "gpt-oss": ("GptOssForCausalLM", _GPT_OSS),
    "llama4": ("Llama4ForCausalLM", _LLAMA4),
    "llama4-chunked": (
        "Llama4ForCausalLM",
        {
            **_LLAMA4,
            "attention_chunk_size": 24,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "floor_scale": 16,
            "attn_scale": 0.3,
        },
    ),
    "llama4-unnormed": (
        "Llama4ForCausalLM",
        {**_LLAMA4, "use_qk_norm": False, "moe_layers": [1, 2], "attn_temperature_tuning": False},
    ),
    "ministral3": ("Ministral3ForCausalLM", _MINISTRAL3),
    "olmoe": (
        "OlmoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48},
    ),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True}),
    "cohere": ("CohereForCausalLM", {}),
    **SCANS,
    "lfm2": ("Lfm2ForCausalLM", _LFM2),
    "lfm2-bias": (
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "conv", "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {**_DELTA, **_DELTA_EXPERTS},
    ),
    "kimi-linear-sparse": (
        "KimiLinearForCausalLM",
        {
            **{it: size for it, size in _LATENT.items() if it != "n_routed_experts"},
            **{"q_lora_rank": None, "num_local_experts": 8, "initializer_range": 0.2},
            **{"linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["sparse"] * 3},
            "layer_types": [*["linear_attention"] * 2, "full_attention"],
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeForCausalLM",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.3,
        },
    ),
    "qwen3.5-dense": (
        "Qwen3_5ForCausalLM",
        _QWEN3_5,
    ),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", _QWEN3_5_MOE),
    "qwen3-next-dense": ("Qwen3NextForCausalLM", {**_DELTA, "num_experts": 0}),
    "command-r-plus": ("CohereForCausalLM", {"use_qk_norm": True, "head_dim": 24}),
    "stablelm-12b": (
        "StableLmForCausalLM",
        {"qk_layernorm": True, "use_parallel_residual": True, "num_attention_heads": 8},
    ),
    "dynamic-ntk": ("LlamaForCausalLM", {"rope_parameters": _DYNAMIC}),
    "cwm": (
        "CwmForCausalLM",
        {"sliding_window": 24, "num_hidden_layers": 4, "head_dim": 16, "bos_token_id": 1},
    ),
    "gemma": ("GemmaForCausalLM", {"head_dim": 24, "num_key_value_heads": 1}),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 1.5}),
    "flex-olmo": ("FlexOlmoForCausalLM", {"num_experts": 5, "num_experts_per_tok": 2}),
    "phi": ("PhiForCausalLM", {"num_attention_heads": 2}),
    "starcoder2": ("Starcoder2ForCausalLM", {"num_key_value_heads": 1}),
    "nemotron": ("NemotronForCausalLM", {"head_dim": 24}),
    "arcee": ("ArceeForCausalLM", {"mlp_bias": True}),
    "jais2": ("Jais2ForCausalLM", {}),
    "bitnet-relu2": ("BitNetForCausalLM", {"rms_norm_eps": 1e-5}),
    "bitnet": (
        "BitNetForCausalLM",
        {"hidden_act": "silu", "num_attention_heads": 8, "tie_word_embeddings": True},
    ),
    "persimmon": ("PersimmonForCausalLM", {"num_attention_heads": 2}),
    "apertus": ("ApertusForCausalLM", {"rope_parameters": _LLAMA3_ROPE}),
    "dots1": ("Dots1ForCausalLM", {**_SIGMOIDS, "sliding_window": None}),
    "solar-open": ("SolarOpenForCausalLM", {**_SIGMOIDS, "head_dim": 24}),
    "exaone-moe": ("ExaoneMoeForCausalLM", {**_EXAONE4, **_SIGMOIDS, "num_experts": 6}),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {**_EXPERTS, "head_dim": 16, "rope_parameters": _HALF_ROPE},
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        {
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            **{"head_dim": 24, "sliding_window": 24, "num_hidden_layers": 4, "route_scale": 1.7},
            **{"mup_enabled": True, "num_shared_experts": 1},
        },
    ),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        {
            **{"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 24},
            **{"qk_rope_head_dim": 8, "scale_emb": 3, "dim_model_base": 32},
        },
    ),
    "ernie4.5": ("Ernie4_5ForCausalLM", {"head_dim": 24, "use_bias": True}),
    "ernie4.5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48},
    ),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", {"rope_parameters": _ALPHA, "head_dim": 24}),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", {"num_experts": 5, "moe_topk": 2, "head_dim": 24}),
    "gpt2": ("GPT2LMHeadModel", {**_GPT2, "activation_function": "gelu"}),
    "gpt2-new": ("GPT2LMHeadModel", {**_GPT2, "n_inner": 96}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", _GPT2),
    "gpt-bigcode-heads": ("GPTBigCodeForCausalLM", {**_GPT2, "multi_query": False}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "gpt-neox-sequential": (
        "GPTNeoXForCausalLM",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
    ),
    "gptj": ("GPTJForCausalLM", {**_GPT2, "rotary_dim": 8}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 96}),
    "bloom": ("BloomForCausalLM", {"n_layer": 3, "n_head": 6, "hidden_size": 96}),
    "falcon": ("FalconForCausalLM", {}),
    "falcon-groups": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    ),
    "falcon-one-norm": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": (
        "FalconForCausalLM",
        {"parallel_attn": False, "multi_query": False, "bias": True},
    ),
    "mpt": (
        "MptForCausalLM",
        {
            **{"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512},
            "attn_config": {"clip_qkv": 1.5},
        },
    ),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 24, "num_hidden_layers": 4}),
    **OWN_ARITHMETIC,
}
"""Class in transformers and values that are not those of `_SHAPE`, by name."""
TEXT_PARTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral3": ("Mistral3", "MistralConfig", {"head_dim": 16, "sliding_window": None}),
    "llava": ("Llava", "LlamaConfig", {}),
    "qwen2.5-vl": ("Qwen2_5_VL", "Qwen2_5_VLTextConfig", {"rope_parameters": _MROPE}),
    "ministral3-vl": ("Mistral3", "Ministral3Config", _MINISTRAL3),
    "gemma3-vl": ("Gemma3", "Gemma3TextConfig", _GEMMA),
    "gemma4-vl": (
        "Gemma4",
        "Gemma4TextConfig",
        {**OWN_ARITHMETIC["gemma4"][1], "pad_token_id": 0},
    ),
    "qwen3.5-vl": ("Qwen3_5", "Qwen3_5TextConfig", _QWEN3_5),
    "qwen3.5-moe-vl": ("Qwen3_5Moe", "Qwen3_5MoeTextConfig", _QWEN3_5_MOE),
    "kimi-k2.5": ("Kimi_K25", "DeepseekV3Config", _KIMI_K2),
    "qwen3-vl": ("Qwen3VL", "Qwen3VLTextConfig", {"head_dim": 32}),
    "smolvlm": ("SmolVLM", "LlamaConfig", {}),
    "idefics3": ("Idefics3", "LlamaConfig", {"num_key_value_heads": 4}),
    "qwen3-vl-moe": ("Qwen3VLMoe", "Qwen3VLMoeTextConfig", _QWEN3_VL_MOE),
    "internvl-qwen3-moe": ("InternVL", "Qwen3MoeConfig", _QWEN3_VL_MOE),
    "cohere2-vision": ("Cohere2Vision", "Cohere2Config", {"sliding_window": 24}),
    "lfm2-vl": ("Lfm2Vl", "Lfm2Config", _LFM2),
    "granite-vision": ("LlavaNext", "GraniteConfig", _MULTIPLIERS),
    "exaone4.5": ("Exaone4_5_", "Exaone4Config", _EXAONE4),
    "idefics2": ("Idefics2", "MistralConfig", {"sliding_window": 24}),
}
"""Models that see: class in transformers without its end, class of the text part's configuration, values."""


def make_model(name: str, **sizes: Any) -> transformers.PreTrainedModel:
    """A float32 model with norms that are not one and biases that are not zero, the same every time; `sizes` are
    other values of its configuration."""
    if name in TEXT_PARTS:
        return _make_seeing(name, **sizes)
    kind, changes = FAMILIES[name]
    return make_random(name, kind, {**changes, **sizes})


_COUNTS = ("num_layers", "n_layers", "n_layer", "num_hidden_layers")
_WITH_STATES = ("lfm2", "qwen3-next", "qwen3.5")
_NORMS_LESS_ONE = ("gemma", "qwen3-next", "qwen3.5", "nemotron", "plamo", "ouro", "step")


def of_one_layer(name: str) -> dict[str, Any]:
    """Values of a configuration by which a family has one layer, its last one, or the least that it can."""
    _, changes = FAMILIES[name]
    own = [it for it in _COUNTS if it in {**changes, "num_hidden_layers": 0}]
    count = changes.get(own[0], _SHAPE["num_hidden_layers"])
    lists = {
        key: value[-1:]
        for key, value in changes.items()
        if isinstance(value, list) and len(value) == count
    }
    zeros = {"num_kv_shared_layers": 0} if "num_kv_shared_layers" in changes else {}
    lists |= {"moe_layers": [0]} if "moe_layers" in changes else {}
    if name.startswith(_WITH_STATES):  # transformers keeps no states alone
        lists["layer_types"] = ["full_attention"]
    if name == "longcat-flash":
        return {"num_layers": 1, "num_hidden_layers": 2}
    return {**dict.fromkeys(own, 1), **lists, **zeros}


def make_random(
    name: str, kind: str | type, values: Mapping[str, Any]
) -> transformers.PreTrainedModel:
    """A model of a class of transformers whose configuration has these values, the same for each name."""
    cls: Any = getattr(transformers, kind) if isinstance(kind, str) else kind
    return _randomize(name, cls, cls.config_class(**{**_SHAPE, **values}))


def _make_seeing(name: str, **sizes: Any) -> transformers.PreTrainedModel:
    kind, text_kind, changes = TEXT_PARTS[name]
    text = getattr(transformers, text_kind)(**_SHAPE | changes | sizes)
    config = getattr(transformers, f"{kind}Config")(
        text_config=text.to_dict(), vision_config=dict(_VISION), tie_word_embeddings=False
    )
    return _randomize(name, getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def _randomize(name: str, cls: Any, config: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(len(name))
    model = cls(config).float().eval()
    less_one = name.startswith(_NORMS_LESS_ONE) and not name.startswith(("gemma3n", "gemma4"))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.3)
            elif parameter_name.endswith(("output_scale", "router.scale", "expert_scale")):
                parameter.normal_(mean=1, std=0.2)
            elif "act_fn" in parameter_name:
                parameter.normal_(std=0.5)
            elif "norm" in parameter_name:
                mean = 0 if less_one and "linear_attn" not in parameter_name else 1
                parameter.normal_(mean=mean, std=0.2)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model
