# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family, saved by transformers, which is also the oracle for what they answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from kept_answers import ANSWERS, key_of

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": _YARN_ROPE}),
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "hidden_size": 96}),
    "qwen2-windowed": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "llama": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"head_dim": 24, "rope_parameters": _LLAMA3_ROPE}),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 24, "num_key_value_heads": 1}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-windowed": ("Mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-windowed": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
}


WITH_EXPERTS = [name for name, (kind, _) in FAMILIES.items() if kind in ("Mixtral", "Qwen3Moe")]


def make_model(family: str, **sizes: Any) -> transformers.PreTrainedModel:
    """A float32 model with biases that are not all zero, the same every time; `sizes` are other than usual."""
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**_SHAPE | changes | sizes)
    torch.manual_seed(len(family))
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in parameter_name:
                parameter.normal_(mean=1, std=0.2)
    return model


def save_model(family: str, directory: Path, **options: Any) -> transformers.PreTrainedModel:
    model = make_model(family)
    model.save_pretrained(directory, **options)
    return model


def continuation(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation of `prompt` by transformers, which says it once: it is kept."""
    key = key_of(model, prompt, count)
    return ANSWERS.find(transformers.__version__, key, lambda: _generate(model, prompt, count))


def _generate(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
