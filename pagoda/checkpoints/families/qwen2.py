"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from pagoda.checkpoints.families.shared import layer_windows, with_attention
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    windows = layer_windows(fields, spec.num_layers)
    return with_attention(spec, windows, qkv_bias=True, output_bias=False)


QWEN2 = Family(
    "Qwen2ForCausalLM",
    "Qwen2, Qwen2.5, text of Qwen2-VL and Qwen2.5-VL",
    _adapt,
    gguf=GgufFormat("qwen2"),
    model_types=frozenset({"qwen2", "qwen2_vl_text", "qwen2_5_vl_text"}),
    aliases=frozenset({"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}),
)
