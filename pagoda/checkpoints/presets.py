# SPDX-License-Identifier: Apache-2.0
"""Shapes of well-known models, served with random weights by `--load-format dummy`.

Each is the model's own config.json, cut to what its shape depends on.
"""

from __future__ import annotations

from collections.abc import Mapping


def _preset(
    family: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, **more: object
) -> Mapping[str, object]:
    return {
        "architectures": [f"{family}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        **more,
    }


_QWEN3 = {
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "vocab_size": 151936,
}
_TIED = {"tie_word_embeddings": True}
_EXPERTS = {
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_LLAMA3 = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "vocab_size": 128256,
}
_LLAMA3_ROPE = {
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA_1B = {"head_dim": 64, "rope_scaling": _LLAMA3_ROPE | {"factor": 32.0}}
_LLAMA_8B = {"head_dim": 128, "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0}}
_MIXTRAL = {
    "max_position_embeddings": 32768,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000,
    "vocab_size": 32000,
}

PRESETS: Mapping[str, Mapping[str, object]] = {
    "qwen3-0.6b": _preset("Qwen3", 28, 1024, 3072, 16, 8, **_QWEN3, **_TIED),
    "qwen3-4b": _preset("Qwen3", 36, 2560, 9728, 32, 8, **_QWEN3, **_TIED),
    "qwen3-14b": _preset("Qwen3", 40, 5120, 17408, 40, 8, **_QWEN3),
    "llama-3.2-1b": _preset("Llama", 16, 2048, 8192, 32, 8, **_LLAMA3, **_LLAMA_1B, **_TIED),
    "llama-3.1-8b": _preset("Llama", 32, 4096, 14336, 32, 8, **_LLAMA3, **_LLAMA_8B),
    "qwen3-30b-a3b": _preset("Qwen3Moe", 48, 2048, 6144, 32, 4, **_QWEN3, **_EXPERTS),
    "mixtral-8x7b": _preset("Mixtral", 32, 4096, 14336, 32, 8, **_MIXTRAL),
}
"""Preset name -> Hugging Face config.json."""
