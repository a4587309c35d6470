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

_HEADS = {
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "classifier": "cls.output",
}
"""Layers of heads that score; those of BERT have a layer in front that files lack."""


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
