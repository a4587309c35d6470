# SPDX-License-Identifier: Apache-2.0
"""The weights of a random Qwen3 directory as a GGUF file, for llama.cpp. Needs the package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

from benchmarks.cpu.random_model import MERGE, WEIGHTS_FILE, GgufType, vocabulary

_TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
_FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def write_gguf(directory: Path, config: Mapping[str, Any], path: Path, kind: GgufType) -> None:
    """Writes the weights in `directory` to `path`: every matrix, the embedding too, in one type."""
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "qwen3")
    _add_shape(writer, config)
    writer.add_file_type(_FILE_TYPES[kind])
    _add_vocabulary(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    with safe_open(directory / WEIGHTS_FILE, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            tensor = weights.get_tensor(name).to(torch.float32).numpy()
            stored_name = names.get_name(name, try_suffixes=(".weight",)) or name
            if tensor.ndim == 1:
                writer.add_tensor(stored_name, tensor)
            else:
                quantized = gguf.quants.quantize(tensor, _TYPES[kind])
                writer.add_tensor(stored_name, quantized, raw_dtype=_TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


def _add_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary(size))
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([*[normal] * (size - 1), control])
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_eos_token_id(size - 1)
