# SPDX-License-Identifier: Apache-2.0
"""Tiny quantized checkpoints, packed here bit by bit from the published descriptions of their formats.

Each weight comes with the numbers that its format says it stands for, worked out in float64.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_DENSE = ("lm_head", r"re:.*\.mlp\.gate$")

Stored = dict[str, Tensor]
"""Tensors of a linear map by the ends of their names."""


@dataclass(frozen=True)
class Format:
    quantization_config: dict[str, Any]
    store: Callable[[np.ndarray], tuple[Stored, np.ndarray]]
    """Turns a weight [out, in] into tensors and the weight that they stand for."""
    head: bool = False
    """True if the head is quantized too."""
    top: dict[str, Any] = field(default_factory=dict)
    """Further fields of config.json."""


def pack_words(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Unsigned codes [n, m] in 32-bit words [n, m * bits / 32]; `places[i]` is where in its word code i lies."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per_word), dtype=np.uint64)
    for index in range(per_word):
        place = index if places is None else places[index]
        words |= codes[:, index::per_word].astype(np.uint64) << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def grouped(
    weight: np.ndarray, bits: int, groups: np.ndarray, *, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in], zero points and scales [out, groups]; `groups` says where each input belongs."""
    num_groups = int(groups.max()) + 1
    lows = np.stack([weight[:, groups == g].min(1) for g in range(num_groups)], 1)
    highs = np.stack([weight[:, groups == g].max(1) for g in range(num_groups)], 1)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = np.maximum(np.abs(lows), np.abs(highs)) / (middle - 0.5)
        zeros = np.full_like(scales, middle)
    else:
        lows, highs = np.minimum(lows, -1e-3), np.maximum(highs, 1e-3)
        scales = (highs - lows) / top
        zeros = np.clip(np.round(-lows / scales), 1, top)
    scales = _rounded_to(scales, scale_dtype)
    codes = np.clip(np.round(weight / scales[:, groups]) + zeros[:, groups], 0, top)
    return codes.astype(np.int64), zeros.astype(np.int64), scales


def _rounded_to(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).double().numpy()


def _meant(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    return (codes - zeros[:, groups]) * scales[:, groups]


def _tensor(values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if dtype is None else tensor.to(dtype)


def _group_of(inputs: int, group_size: int, *, shuffled: bool = False) -> np.ndarray:
    """The group of each input; maps of the same inputs have the same, as act-order comes from the inputs."""
    groups = np.arange(inputs) // (inputs if group_size == -1 else group_size)
    return np.random.default_rng(inputs).permutation(groups) if shuffled else groups


# ---- compressed-tensors


def int8_format(*, flat_scales: bool = False, top: str = "quantization_config") -> Format:
    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        scales = np.abs(weight).max(1, keepdims=True) / 127
        scales = _rounded_to(scales, torch.bfloat16)
        codes = np.clip(np.round(weight / scales), -127, 127)
        stored = _tensor(scales[:, 0] if flat_scales else scales, torch.bfloat16)
        return {"weight": _tensor(codes, torch.int8), "weight_scale": stored}, codes * scales

    inputs = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
        "group_size": None,
        "observer": None,
    }
    weights = inputs | {"strategy": "channel", "dynamic": False, "observer": "minmax"}
    config = compressed_tensors("int-quantized", weights, inputs)
    return Format({} if top == "compression_config" else config, store, top={top: config})


def packed_format(
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    ignore: tuple[str, ...] = _DENSE,
) -> Format:
    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        groups = _group_of(weight.shape[1], group_size, shuffled=act_order)
        codes, zeros, scales = grouped(
            weight, bits, groups, symmetric=symmetric, scale_dtype=scale_dtype
        )
        stored = {
            "weight_packed": _tensor(pack_words(codes, bits)),
            "weight_scale": _tensor(scales, scale_dtype),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = _tensor(pack_words(zeros.T, bits).T)
        if act_order:
            stored["weight_g_idx"] = _tensor(groups, torch.int32)
        return stored, _meant(codes, zeros, scales, groups)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "actorder": "group" if act_order else None,
    }
    config = compressed_tensors("pack-quantized", weights, None) | {"ignore": list(ignore)}
    return Format(config, store, head="lm_head" not in ignore)


def compressed_tensors(
    layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": list(_DENSE),
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group | {"output_activations": None}},
    }


# ---- fp8

FP8_MAXIMA = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def _store_fp8(
    weight: np.ndarray, block: tuple[int, int], stored_as: torch.dtype, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Numbers [out, in], scales by block, and what they stand for."""
    rows, columns = block
    padded = np.pad(
        weight, [(0, -size % step) for size, step in zip(weight.shape, block, strict=True)]
    )
    tiles = padded.reshape(len(padded) // rows, rows, padded.shape[1] // columns, columns)
    scales = np.abs(tiles).max((1, 3)) / FP8_MAXIMA[stored_as]
    if scale_dtype == torch.float8_e8m0fnu:
        scales = 2.0 ** np.ceil(np.log2(scales))
    scales = _rounded_to(scales, scale_dtype)
    spread = scales.repeat(rows, 0).repeat(columns, 1)[: weight.shape[0], : weight.shape[1]]
    values = torch.from_numpy(weight / spread).clamp(-FP8_MAXIMA[stored_as], FP8_MAXIMA[stored_as])
    values = values.to(stored_as)
    return values, _tensor(scales, scale_dtype), values.double().numpy() * spread


def fp8_tensors_format(
    strategy: str,
    *,
    stored_as: torch.dtype = torch.float8_e4m3fn,
    scale_dtype: torch.dtype = torch.bfloat16,
    flat_scales: bool = False,
    dynamic: bool = True,
    ignore: tuple[str, ...] = _DENSE,
) -> Format:
    """compressed-tensors' float-quantized, by its `strategy`: tensor, channel, group (64) or block (128 × 96)."""

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        outputs, inputs = weight.shape
        blocks = {
            "tensor": (outputs, inputs),
            "channel": (1, inputs),
            "group": (1, 64),
            "block": (128, 96),
        }
        values, scales, meant = _store_fp8(weight, blocks[strategy], stored_as, scale_dtype)
        stored = {"weight": values, "weight_scale": scales.flatten() if flat_scales else scales}
        return stored | ({} if dynamic else {"input_scale": torch.ones(1)}), meant

    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": 64 if strategy == "group" else None,
        "block_structure": [128, 96] if strategy == "block" else None,
        "dynamic": False,
    }
    inputs = weights | {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    config = compressed_tensors("float-quantized", weights, inputs) | {"ignore": list(ignore)}
    return Format(config, store, head="lm_head" not in ignore)


def fp8_format(
    block: tuple[int, int] | None,
    *,
    scale_dtype: torch.dtype = torch.float32,
    scales_name: str = "weight_scale_inv",
    scheme: str = "dynamic",
) -> Format:
    """`quant_method` `fp8`: blocks as of DeepSeek-V3 and Qwen3-FP8, or one scale, a plain number."""

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        shape = weight.shape if block is None else block
        values, scales, meant = _store_fp8(weight, shape, torch.float8_e4m3fn, scale_dtype)
        stored = {"weight": values, scales_name: scales.reshape(()) if block is None else scales}
        return stored | (
            {} if scheme == "dynamic" else {"activation_scale": torch.tensor(1.0)}
        ), meant

    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme}
    if block is not None:
        config["weight_block_size"] = list(block)
    return Format(config | {"modules_to_not_convert": ["lm_head"]}, store)


# ---- AWQ and GPTQ

AWQ_SLOTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's order: slot k of a word, from the lowest bits on, holds code `AWQ_SLOTS[k]`."""


def awq_format(group_size: int) -> Format:
    places = tuple(AWQ_SLOTS.index(code) for code in range(8))

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        groups = _group_of(weight.shape[1], group_size)
        codes, zeros, scales = grouped(
            weight, 4, groups, symmetric=False, scale_dtype=torch.float16
        )
        stored = {
            "qweight": _tensor(pack_words(codes.T, 4, places)),
            "qzeros": _tensor(pack_words(zeros.T, 4, places)),
            "scales": _tensor(scales.T, torch.float16),
        }
        return stored, _meant(codes, zeros, scales, groups)

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    return Format(config | {"zero_point": True, "modules_to_not_convert": None}, store)


def gptq_format(
    bits: int,
    group_size: int,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    version: int = 1,
    head: bool = False,
) -> Format:
    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        groups = _group_of(weight.shape[1], group_size, shuffled=act_order)
        codes, zeros, scales = grouped(
            weight, bits, groups, symmetric=symmetric, scale_dtype=torch.float16
        )
        stored_zeros = zeros - 1 if version == 1 else zeros
        stored = {
            "qweight": _tensor(pack_words(codes, bits).T),
            "qzeros": _tensor(pack_words(stored_zeros.T, bits)),
            "scales": _tensor(scales.T, torch.float16),
            "g_idx": _tensor(groups, torch.int32),
        }
        return stored, _meant(codes, zeros, scales, groups)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": act_order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "lm_head": head,
    }
    return Format(config, store, head=head)


# ---- whole models


def save_quantized(
    directory: Path, how: Format, *, experts: bool = False
) -> tuple[transformers.PreTrainedModel, dict[str, np.ndarray]]:
    """Writes a model; returns it in float32 with the weights that the files stand for, and those weights.

    With `experts` it is a mixture of experts, whose routers are dense.
    """
    torch.manual_seed(1)
    kind, sizes = "Qwen2", {}
    if experts:
        kind = "Qwen3Moe"
        sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = getattr(transformers, f"{kind}Config")(
        **SHAPE | sizes | {"tie_word_embeddings": False}
    )
    family = getattr(transformers, f"{kind}ForCausalLM")
    model = family(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return store_quantized(model, directory, how)


def store_quantized(
    model: transformers.PreTrainedModel,
    directory: Path,
    how: Format,
    linears: str = r"_proj(_with_mqa)?",
    more: Mapping[str, Tensor] | None = None,
) -> tuple[transformers.PreTrainedModel, dict[str, np.ndarray]]:
    """Writes a model; returns it with the weights that the files stand for, and those weights. Names of its linear
    maps end as the pattern `linears` says. `more` are tensors of the files that the model lacks."""
    model.save_pretrained(directory)
    tensors: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    meant: dict[str, np.ndarray] = {}
    for name, tensor in (load_file(_file(directory)) | dict(more or {})).items():
        module = name.removesuffix(".weight")
        if re.search(rf"({linears})\.weight$", name) is None and not (
            how.head and module == "lm_head"
        ):
            tensors[name] = dense[name] = tensor
            continue
        stored, meant[module] = how.store(tensor.double().numpy())
        dense[name] = torch.from_numpy(meant[module]).float()
        tensors |= {f"{module}.{kind}": part for kind, part in stored.items()}
    save_file(dense, _file(directory), metadata={"format": "pt"})
    model = type(model).from_pretrained(directory).float().eval()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, _file(directory))
    path = directory / "config.json"
    written = json.loads(path.read_bytes())
    written |= {"quantization_config": how.quantization_config} if how.quantization_config else {}
    path.write_text(json.dumps(written | how.top))
    return model, meant


def _file(directory: Path) -> Path:
    return directory / "model.safetensors"
