# SPDX-License-Identifier: Apache-2.0
"""GGUF files of transformers models, as llama.cpp's converter writes them."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf_deltas import delta_tensors
from gguf_files import finish
from safetensors.torch import load_file

ARCHITECTURES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Mixtral": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3moe",
    "Phi3": "phi3",
    "SeedOss": "seed_oss",
    "SmolLM3": "smollm3",
    "Gemma": "gemma",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Qwen2Moe": "qwen2moe",
    "Granite": "granite",
    "GraniteMoe": "granitemoe",
    "GraniteMoeShared": "granitemoe",
    "GraniteMoeHybrid": "granitemoe",
    "Glm4Moe": "glm4moe",
    "Olmo2": "olmo2",
    "Olmo3": "olmo2",
    "Olmoe": "olmoe",
    "StableLm": "stablelm",
    "Cohere": "command-r",
    "Cohere2": "cohere2",
    "Lfm2": "lfm2",
    "Lfm2Moe": "lfm2moe",
    "Qwen3Next": "qwen3next",
    "Qwen3_5": "qwen35",
    "Qwen3_5Moe": "qwen35moe",
    "Glm": "chatglm",
    "GptOss": "gpt-oss",
    "Llama4": "llama4",
    "Ministral3": "mistral3",
    "Glm4": "glm4",
    "Exaone4": "exaone4",
    "DeepseekV2": "deepseek2",
    "DeepseekV3": "deepseek2",
    "Glm4MoeLite": "deepseek2",
    "Phi": "phi2",
    "Starcoder2": "starcoder2",
    "Nemotron": "nemotron",
    "Arcee": "arcee",
    "Olmo": "olmo",
    "Dots1": "dots1",
    "Ernie4_5": "ernie4_5",
    "HunYuanDenseV1": "hunyuan-dense",
}
_ENUM = {
    "granitemoe": "GRANITE_MOE",
    "granitehybrid": "GRANITE_HYBRID",
    "glm4moe": "GLM4_MOE",
}
"""Architectures whose names in the package are not just their own in capitals."""
_PERMUTED = (
    *(
        "llama",
        "llama-embed",
        "smollm3",
        "granite",
        "granitemoe",
        "granitehybrid",
        "mistral3",
        "arcee",
        "olmo",
    ),
    "internlm2",
)
"""Architectures whose heads are brought into the order that ggml rotates; some have it in checkpoints already."""
_WINDOWED = (
    "mistral",
    "mixtral",
    "phi3",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "cohere2",
    "gpt_oss",
    "exaone4",
)
_RENAMED = {
    "_correction_bias": "_correction.bias",
    ".expert_bias": ".expert_bias.bias",
    ".dt_bias": ".dt_proj.bias",
}
"""Parts of names of tensors with what the package knows them by."""
HALVES: dict[Kind, tuple[int, ...]] = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    **dict.fromkeys((Kind.IQ1_S, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S), (0,)),
    **dict.fromkeys((Kind.IQ3_XXS, Kind.IQ3_S), (0,)),
    Kind.IQ1_M: (),
}
"""Places of float16 numbers in a block of the types that the `gguf` package cannot write."""

_NOT_SAID = {("n_group", "dots1"), ("topk_group", "dots1")}
"""Fields that the converter leaves out."""

Choose = Callable[[str], Kind]
"""The type of a matrix by its name in the file."""


def save_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    choose: Choose = lambda _: Kind.F32,
    *,
    architecture: str = "",
    joins_latents: bool = False,
    head: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, np.ndarray]:
    """Returns the weights as they are in the file, by their names there, dequantized by the `gguf` package.

    Without `architecture`, it is that of the model's class. With `joins_latents`, latent attention is as in files
    of before April 2025. `head` are the tensors of layers behind those of the model, by their names in a
    checkpoint; without them there is but a sign of these.
    """
    config = model.config
    own = type(model).__name__.removesuffix("ForCausalLM")
    architecture = architecture or ARCHITECTURES[own]
    is_dense = getattr(config, "num_local_experts", None) == 0
    has_state = own == "GraniteMoeHybrid" and "linear_attention" in config.layer_types
    if has_state:
        architecture = "granitehybrid"
    if architecture == "granitemoe" and is_dense:
        architecture = "granite"
    writer = GGUFWriter(path, architecture)
    _add_shape(writer, config, joins_latents=joins_latents)
    known_as = _ENUM.get(architecture, architecture.upper().replace("-", "_"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[known_as], 99)
    stored = {}
    tensors = published(model, path.parent, head or {}, joins_latents=joins_latents)
    if getattr(config, "linear_num_value_heads", None) is not None:
        tensors = dict(delta_tensors(tensors, config, tiled=architecture.startswith("qwen35")))
    for name, values in tensors.items():
        if architecture in _PERMUTED and ".q_proj." in name:
            values = _neighbours(values, config.num_attention_heads)
        if architecture in _PERMUTED and ".k_proj." in name:
            values = _neighbours(values, config.num_key_value_heads)
        is_offset = architecture.startswith(("gemma", "qwen3next", "qwen35", "nemotron"))
        if is_offset and name.endswith("norm.weight") and "linear_attn" not in name:
            values = values + 1
        if name.endswith(".A_log"):
            values = -values.exp()
        if values.dim() > 1:  # as the converter squeezes all
            values = values.squeeze()
        if has_state and name.endswith((".A_log", ".D")):
            values = values[:, None]
        if has_state and name.endswith("mamba.norm.weight"):
            values = values.unflatten(0, (config.mamba_n_groups, -1))
        if is_dense:
            name = name.replace("shared_experts.", "").replace(
                "shared_mlp.output_linear", "mlp.down_proj"
            )
        if name.endswith(".sinks"):
            name += ".weight"
        for other, known in _RENAMED.items():
            name = name.replace(other, known)
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        kind = choose(short) if values.dim() > 1 else Kind.F32
        data = quantized(values.numpy(), kind)
        writer.add_tensor(short, data, raw_dtype=kind)
        stored[short] = gguf.dequantize(data, kind).reshape(values.shape)
    if (factors := frequency_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    if _rope(config)["rope_type"] == "longrope":
        for kind in ("long", "short"):
            factors = np.array(_rope(config)[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    for layer in range(0 if head else _num_extra(config)):
        name = f"blk.{config.num_hidden_layers + layer}.nextn.eh_proj.weight"
        writer.add_tensor(name, np.zeros((4, 8), dtype=np.float32))
    finish(writer)
    return stored


def _num_extra(config: Any) -> int:
    """Layers that predict several tokens at once."""
    return getattr(config, "num_nextn_predict_layers", None) or 0


def published(
    model: transformers.PreTrainedModel,
    scratch: Path,
    more: Mapping[str, torch.Tensor],
    *,
    joins_latents: bool,
) -> dict[str, torch.Tensor]:
    """Tensors by their names in a checkpoint; those of experts as one, as the converter merges them."""
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        model.save_pretrained(directory)
        tensors = load_file(Path(directory) / "model.safetensors") | dict(more)
    merged: dict[str, torch.Tensor | list[torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: _numbers(item[0])):
        found = re.fullmatch(r"(.+\.experts)\.\d+(\..+)", name)
        if found is None:
            merged[name] = tensor.float()
        else:
            joined = (
                found[1]
                .replace("model.layers", "layers")
                .replace("block_sparse_moe", "feed_forward")
            )
            name = f"{joined if 'feed_forward' in joined else found[1]}{found[2]}"
            merged.setdefault(name, []).append(tensor.float())
    found_all: dict[str, torch.Tensor] = {}
    for name, tensor in merged.items():
        values = torch.stack(tensor) if isinstance(tensor, list) else tensor
        if "kv_b_proj" in name and not joins_latents:
            found_all |= _heads_of_latents(name, values, model.config)
        else:
            found_all |= _split(name, values)
    return found_all


def _heads_of_latents(name: str, values: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Keys, transposed, and values of each head, which the converter takes apart."""
    heads = values.unflatten(0, (config.num_attention_heads, -1))
    keys, others = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return {
        name.replace("kv_b", "k_b"): keys.transpose(1, 2),
        name.replace("kv_b", "v_b"): others,
    }


_JOINED = {
    "block_sparse_moe.input_linear": "mlp.experts.{}_proj",
    "shared_mlp.input_linear": "mlp.shared_experts.{}_proj",
}
"""Tensors of Granite that hold gates, and ups behind them, with names that the package knows for each."""


def _split(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    if re.search(r"(mlp|feed_forward)\.experts\.(gate_up|down)_proj(_bias)?$", name):
        return _experts_apart(name, values)
    for joined, apart in _JOINED.items():
        if joined in name:
            halves = zip(("gate", "up"), values.chunk(2, dim=-2), strict=True)
            return {name.replace(joined, apart.format(part)): half for part, half in halves}
    return {name: values}


def _experts_apart(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of gpt-oss and Llama 4, with inputs behind and gates apart from ups."""
    stem, _, end = name.rpartition(".")
    takes_turns = "mlp" in stem
    behind = "bias" if end.endswith("_bias") else "weight"
    if behind == "weight":
        values = values.transpose(-1, -2)
    rows = -1 if behind == "bias" else -2
    if end.startswith("down"):
        return {f"{stem}.down_proj.{behind}": values}
    half = values.shape[rows] // 2
    turns = values.unflatten(rows, (half, 2) if takes_turns else (2, half))
    gate, up = turns.unbind(rows if takes_turns else rows - 1)
    return {f"{stem}.gate_proj.{behind}": gate, f"{stem}.up_proj.{behind}": up}


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


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
    if kind is Kind.IQ1_M:  # its half is in the high ends of four words
        digits = np.uint16(0x0C1A) >> np.array([0, 4, 8, 12], dtype=np.uint16) & 15
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | digits.astype(np.uint8) << 4
    return blocks.reshape(*values.shape[:-1], -1)


def _neighbours(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a head in the order that ggml rotates: `i` beside `i + d/2`."""
    heads = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return heads.transpose(1, 2).reshape(values.shape)


def _rope(config: Any) -> dict[str, Any]:
    """The rotary table, of two that of layers that see all."""
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _inner_size(config: Any) -> int:
    """Inner channels of a dense MLP."""
    size: int = config.intermediate_size
    if config.model_type == "lfm2" and config.block_auto_adjust_ff_dim:
        size = int(config.block_ffn_dim_multiplier * int(2 * size / 3))
        size = -(-size // config.block_multiple_of) * config.block_multiple_of
    return size


def _add_shape(writer: GGUFWriter, config: Any, *, joins_latents: bool) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope, is_latent = _rope(config), hasattr(config, "kv_lora_rank")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + _num_extra(config))
    if config.intermediate_size is not None:  # else no layer is dense
        writer.add_feed_forward_length(_inner_size(config))
    writer.add_head_count(config.num_attention_heads)
    if config.model_type in ("lfm2", "lfm2_moe"):
        heads = {"full_attention": config.num_key_value_heads, "conv": 0}
        writer.add_head_count_kv([heads[kind] for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif config.model_type == "granitemoehybrid":
        heads = {"linear_attention": 0, "full_attention": config.num_key_value_heads}
        writer.add_head_count_kv([heads[kind] for kind in config.layer_types])
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
    elif not is_latent:
        writer.add_head_count_kv(config.num_key_value_heads)
    if is_latent:
        _add_latents(writer, config, joins_latents=joins_latents)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    rms_eps = getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None)
    if config.model_type in ("olmo", "nemotron", "starcoder2"):
        writer.add_layer_norm_eps(rms_eps or getattr(config, "norm_epsilon", 1e-5))
    elif rms_eps is not None:
        writer.add_layer_norm_rms_eps(rms_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if (inner := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(inner)
    if config.model_type in ("llama4_text", "gpt_oss"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if config.model_type in ("glm4_moe", "glm4_moe_lite", "lfm2_moe", "deepseek_v3", "dots1"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("attention_factor") is not None:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if getattr(config, "linear_num_value_heads", None) is not None:
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        lengthened = config.max_position_embeddings / rope["original_max_position_embeddings"]
        root = 1 + math.log(lengthened) / math.log(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(math.sqrt(root))
    if config.model_type in _WINDOWED and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("olmo3", "exaone4") and config.sliding_window:
        writer.add_sliding_window_pattern([kind[0] == "s" for kind in config.layer_types])
    if writer.arch == "stablelm":
        writer.add_parallel_residual(True)  # as of all files that config.json does not say it of
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("shared_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("linear_conv_kernel_dim", writer.add_ssm_conv_kernel),
        ("linear_key_head_dim", writer.add_ssm_state_size),
        ("linear_num_key_heads", writer.add_ssm_group_count),
        ("linear_num_value_heads", writer.add_ssm_time_step_rank),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("num_nextn_predict_layers", writer.add_nextn_predict_layers),
        ("clip_qkv", writer.add_clamp_kqv),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
    ):
        if getattr(config, name, None) is not None and (name, config.model_type) not in _NOT_SAID:
            add(getattr(config, name))


def _add_latents(writer: GGUFWriter, config: Any, *, joins_latents: bool) -> None:
    """Sizes of latent attention, which is one KV head to llama.cpp, but was plain heads in older files."""
    rope, key_length = _rope(config), config.qk_nope_head_dim + config.qk_rope_head_dim
    if joins_latents:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(key_length)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def frequency_factors(config: Any) -> np.ndarray | None:
    """Divisors of each frequency in Llama 3.1."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    waves = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / rope["factor"] + kept)).astype(np.float32)
