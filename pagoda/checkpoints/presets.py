"""Shapes of well-known models, served with random weights by `--load-format dummy`.

Each is the model's own config.json, cut to what its shape depends on.
"""

from __future__ import annotations

from collections.abc import Mapping


def _qwen3(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, *, tied: bool
) -> Mapping[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 40960,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }


def _llama3(
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    *,
    head_dim: int,
    rope_factor: float,
    tied: bool,
) -> Mapping[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": rope_factor,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }


_QWEN3_30B_A3B: Mapping[str, object] = {
    **_qwen3(2048, 6144, 48, 32, tied=False),
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}
_MIXTRAL_8X7B: Mapping[str, object] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}

PRESETS: Mapping[str, Mapping[str, object]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "llama-3.2-1b": _llama3(2048, 8192, 16, head_dim=64, rope_factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, head_dim=128, rope_factor=8.0, tied=False),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
}
"""Preset name -> Hugging Face config.json."""
