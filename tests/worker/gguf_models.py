"""GGUF files of transformers models, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf_files import finish

ARCHITECTURES = {"Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}
HALVES: dict[Kind, tuple[int, ...]] = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
"""Places of float16 numbers in a block of the types that the `gguf` package cannot write."""

Choose = Callable[[str], Kind]
"""The type of a matrix by its name in the file."""


def save_gguf(
    model: transformers.PreTrainedModel, path: Path, choose: Choose = lambda _: Kind.F32
) -> dict[str, np.ndarray]:
    """Returns the weights as they are in the file, by their names there, dequantized by the `gguf` package."""
    config = model.config
    architecture = ARCHITECTURES[type(model).__name__.removesuffix("ForCausalLM")]
    writer = GGUFWriter(path, architecture)
    _add_shape(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 99)
    stored = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float()
        if architecture == "llama" and ".q_proj." in name:
            values = _neighbours(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = _neighbours(values, config.num_key_value_heads)
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        kind = choose(short) if values.dim() == 2 else Kind.F32
        data = quantized(values.numpy(), kind)
        writer.add_tensor(short, data, raw_dtype=kind)
        stored[short] = gguf.dequantize(data, kind).reshape(values.shape)
    if (factors := _frequency_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    finish(writer)
    return stored


def quantized(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Blocks near `values` where the package can make them, else any blocks at all, as large as weights are."""
    if kind not in HALVES:
        return gguf.quantize(values, kind)
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    num_blocks = values.size // weights
    blocks = rng.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.uniform(1e-4, 5e-4, num_blocks).astype(np.float16)
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


def _neighbours(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a head in the order that ggml rotates: `i` beside `i + d/2`."""
    heads = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return heads.transpose(1, 2).reshape(values.shape)


def _add_shape(writer: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "mistral" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)


def _frequency_factors(config: Any) -> np.ndarray | None:
    """Divisors of each frequency in Llama 3.1."""
    rope = config.rope_parameters
    if rope["rope_type"] != "llama3":
        return None
    frequencies = rope["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    waves = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / rope["factor"] + kept)).astype(np.float32)
