# SPDX-License-Identifier: Apache-2.0
"""GGUF files of encoders, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import transformers
from gguf import GGUFWriter
from gguf_files import add_values, finish
from safetensors.torch import load_file

_HEADS = {
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "classifier": "cls.output",
}
"""Layers of heads that score; those of BERT have a layer in front that files lack."""


_ROTARY = {
    "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "jina_embeddings_v3": gguf.MODEL_ARCH.JINA_BERT_V3,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "eurobert": gguf.MODEL_ARCH.EUROBERT,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
}
"""Encoders without learned positions, by `model_type`."""


def save_gguf_rotary(
    model: transformers.PreTrainedModel, directory: Path, path: Path, maps: Mapping[str, Any] = {}
) -> None:
    """Writes a file of an encoder that is saved in a directory; `maps` are layers behind pooling."""
    config, arch = model.config, _ROTARY[model.config.model_type]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_key_length(
        getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    )
    writer.add_causal_attention(False)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", 0) or config.norm_eps)
    if config.model_type == "modernbert":
        writer.add_sliding_window(config.local_attention)
        writer.add_sliding_window_pattern(3)
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(2 * (config.sliding_window - 1))
        writer.add_sliding_window_pattern([it == "sliding_attention" for it in config.layer_types])
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for full, values in load_file(directory / "model.safetensors").items():
        if full.startswith("pooler"):
            continue
        known = names.get_name(full, try_suffixes=(".weight", ".bias"))
        known = known or names.get_name(f"model.{full}", try_suffixes=(".weight", ".bias"))
        assert known is not None, full
        if config.model_type == "gemma3_text" and "norm" in full:
            values = values + 1
        data = values.squeeze() if values.numel() > 1 else values.flatten()
        writer.add_tensor(known, data.contiguous().numpy())
    for name, values in maps.items():
        writer.add_tensor(f"{name}.weight", values.numpy())
    finish(writer)


def save_gguf_encoder(
    model: transformers.PreTrainedModel, path: Path, more: Mapping[str, Any] = {}
) -> None:
    """Positions begin with the first token's, and a table of one row is a vector; `more` are other metadata."""
    config, writer = model.config, GGUFWriter(path, "bert")
    first = 0 if config.model_type == "bert" else config.pad_token_id + 1
    writer.add_context_length(config.max_position_embeddings - first)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    add_values(writer, more)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    if model.config.num_labels == 1:
        writer.add_classifier_output_labels(["LABEL_0"])
    for full, values in model.state_dict().items():
        name = full.removeprefix("bert.").removeprefix("roberta.")
        if name.startswith(("pooler", "cls.")) or name.endswith("_ids"):
            continue
        if name.startswith("embeddings.position"):
            values = values[first:]
        stem, _, end = name.rpartition(".")
        known = _HEADS.get(stem) or names.get_name(stem)
        assert known is not None, full
        data = values.squeeze() if values.numel() > 1 else values.flatten()
        writer.add_tensor(f"{known}.{end}", data.contiguous().numpy())
    finish(writer)
