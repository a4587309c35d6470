# SPDX-License-Identifier: Apache-2.0
"""Formats of bitsandbytes, modelopt, auto-round and others, packed here from their published descriptions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from quantized_models import (
    AWQ_SLOTS,
    Format,
    Stored,
    awq_format,
    compressed_tensors,
    fp8_format,
    fp8_tensors_format,
    gptq_format,
    grouped,
    pack_words,
)
from torch import Tensor
from transformers.integrations.bitnet import pack_weights

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""Numbers of `create_normal_map` of bitsandbytes."""
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = tuple(np.array([*_FP4, *(-x for x in _FP4)]) / 12)
"""Numbers of `get_4bit_type` of bitsandbytes: sign, two bits of exponent, one of mantissa."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_E2M1, *(-x for x in _E2M1)])


def _nearest(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return np.abs(values[..., None] - numbers).argmin(-1)


def _octets(codes: np.ndarray, *, high_first: bool) -> np.ndarray:
    first, second = codes.reshape(-1, 2).T.astype(np.uint8)
    return first << 4 | second if high_first else first | second << 4


# ---- bitsandbytes


def bitsandbytes_format(
    kind: str, *, block_size: int = 64, nested: bool = False, storage: torch.dtype = torch.uint8
) -> Format:
    """Four bits, the highest magnitudes of blocks rounded to a table of 256 if `nested`."""
    numbers = np.array(NF4 if kind == "nf4" else FP4).astype(np.float32).astype(np.float64)

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        flat = weight.reshape(-1)
        blocks = np.pad(flat, (0, -len(flat) % block_size)).reshape(-1, block_size)
        highest = np.abs(blocks).max(1)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block_size,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        stored = {"weight.absmax": torch.from_numpy(highest).float()}
        if nested:
            table = (np.linspace(-1, 1, 256) ** 3).astype(np.float32).astype(np.float64)
            offset = float(highest.mean())
            parts = np.pad(highest - offset, (0, -len(highest) % 256)).reshape(-1, 256)
            outer = np.abs(parts).max(1).astype(np.float32).astype(np.float64)
            codes = _nearest(parts / outer[:, None], table)
            highest = (table[codes] * outer[:, None]).reshape(-1)[: len(highest)] + offset
            stored = {
                "weight.absmax": torch.from_numpy(codes.reshape(-1)[: len(highest)]).to(
                    torch.uint8
                ),
                "weight.nested_absmax": torch.from_numpy(outer).float(),
                "weight.nested_quant_map": torch.from_numpy(table).float(),
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = _nearest(blocks / highest[:, None], numbers).reshape(-1)[: len(flat)]
        octets = torch.from_numpy(_octets(codes, high_first=True))
        meant = numbers[codes] * highest.repeat(block_size)[: len(flat)]
        stored |= {
            "weight": octets.view(storage)[:, None],
            "weight.quant_map": torch.from_numpy(numbers).float(),
            f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        return stored, meant.reshape(weight.shape)

    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "llm_int8_skip_modules": ["lm_head", "layers.1.mlp.gate"],
    }
    return Format(config, store)


def bitsandbytes_int8_format() -> Format:
    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        highest = np.abs(weight).max(1).astype(np.float32).astype(np.float64)
        codes = np.round(weight / highest[:, None] * 127)
        stored = {
            "weight": torch.from_numpy(codes).to(torch.int8),
            "SCB": torch.from_numpy(highest).float(),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return stored, codes * highest[:, None] / 127

    return Format(
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, store
    )


# ---- 4-bit floats, and modelopt


def _store_nvfp4(weight: np.ndarray) -> tuple[np.ndarray, Tensor, float, np.ndarray]:
    """Octets, scales of groups of 16, the scale of all, and the numbers that they stand for."""
    of_all = float(np.float32(np.abs(weight).max() / (448 * 6)))
    groups = weight.reshape(len(weight), -1, 16)
    scales = torch.from_numpy(np.abs(groups).max(2) / 6 / of_all).to(torch.float8_e4m3fn)
    spread = scales.double().numpy()[..., None] * of_all
    codes = _nearest(groups / np.where(spread == 0, 1, spread), E2M1)
    octets = _octets(codes, high_first=False).reshape(len(weight), -1)
    return octets, scales, of_all, (E2M1[codes] * spread).reshape(weight.shape)


def nvfp4_format() -> Format:
    """compressed-tensors' `nvfp4-pack-quantized`, which stores the inverse of the scale of all."""

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        octets, scales, of_all, meant = _store_nvfp4(weight)
        stored = {
            "weight_packed": torch.from_numpy(octets),
            "weight_scale": scales,
            "weight_global_scale": torch.tensor([1 / of_all]),
            "input_global_scale": torch.ones(1),
        }
        return stored, meant

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return Format(compressed_tensors("nvfp4-pack-quantized", weights, weights), store)


def modelopt_nvfp4_format(*, beside: bool = False) -> Format:
    """`beside` says that config.json does not tell, but hf_quant_config.json."""

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        octets, scales, of_all, meant = _store_nvfp4(weight)
        stored = {
            "weight": torch.from_numpy(octets),
            "weight_scale": scales,
            "weight_scale_2": torch.tensor(of_all),
            "input_scale": torch.tensor(0.5),
        }
        return stored, meant

    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    }
    return Format({} if beside else config, store)


MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"],
    },
}


def modelopt_fp8_format() -> Format:
    how = fp8_tensors_format("tensor", dynamic=False, flat_scales=True, scale_dtype=torch.float32)
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"]}
    return replace(how, quantization_config=config)


def modelopt_blocks_format() -> Format:
    """Scales have a dimension for what lies within blocks, too."""
    how = fp8_format((128, 128))

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        stored, meant = how.store(weight)
        scales = stored["weight_scale_inv"][:, None, :, None]
        return {"weight": stored["weight"], "weight_scale": scales}, meant

    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]}
    return Format(config, store)


def mxfp4_format() -> Format:
    """compressed-tensors' `mxfp4-pack-quantized`."""

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        groups = weight.reshape(len(weight), -1, 32)
        exponents = np.floor(np.log2(np.abs(groups).max(2))) - 2
        spread = 2.0 ** exponents[..., None]
        codes = _nearest(groups / spread, E2M1)
        octets = _octets(codes, high_first=False).reshape(len(weight), -1)
        stored = {
            "weight_packed": torch.from_numpy(octets),
            "weight_scale": torch.from_numpy(exponents + 127).to(torch.uint8),
        }
        return stored, (E2M1[codes] * spread).reshape(weight.shape)

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return Format(compressed_tensors("mxfp4-pack-quantized", weights, None), store)


# ---- small integers


def integers_format(
    bits: int, strategy: str, *, symmetric: bool = True, dynamic: bool = True
) -> Format:
    """compressed-tensors' `int-quantized`, a byte for each code."""

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        size = 64 if strategy == "group" else weight.shape[1]
        groups = np.arange(weight.shape[1]) // size
        values = weight.reshape(1, -1) if strategy == "tensor" else weight
        own = np.zeros(values.shape[1], dtype=int) if strategy == "tensor" else groups
        codes, zeros, scales = grouped(
            values, bits, own, symmetric=symmetric, scale_dtype=torch.bfloat16
        )
        if strategy != "group" and symmetric:
            codes = np.maximum(codes, 1)  # -128 has no counterpart
        meant = ((codes - zeros[:, own]) * scales[:, own]).reshape(weight.shape)
        middle = 2 ** (bits - 1)
        stored = {
            "weight": torch.from_numpy(codes - middle).to(torch.int8).reshape(weight.shape),
            "weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
        }
        if strategy == "tensor":
            stored["weight_scale"] = stored["weight_scale"].flatten()
        if not symmetric:
            stored["weight_zero_point"] = torch.from_numpy(zeros - middle).to(torch.int8)
        if not dynamic:
            stored |= {"input_scale": torch.ones(1), "input_zero_point": torch.zeros(1).char()}
        return stored, meant

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": 64 if strategy == "group" else None,
    }
    inputs = {
        "num_bits": 8,
        "type": "int",
        "symmetric": dynamic,
        "strategy": "token" if dynamic else "tensor",
        "dynamic": dynamic,
    }
    return Format(compressed_tensors("int-quantized", weights, inputs), store)


def gptq_stream_format(bits: int, group_size: int, **options: Any) -> Format:
    """GPTQ of 2 or 3 bits, whose codes follow one another over the borders of words."""
    how = gptq_format(bits, group_size, **options)
    if bits != 3:
        return how
    version = options.get("version", 1)

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        groups = np.arange(weight.shape[1]) // group_size
        codes, zeros, scales = grouped(
            weight, 3, groups, symmetric=options.get("symmetric", True), scale_dtype=torch.float16
        )
        meant = (codes - zeros[:, groups]) * scales[:, groups]
        stored = {
            "qweight": torch.from_numpy(np.ascontiguousarray(_three_bits(codes).T)),
            "qzeros": torch.from_numpy(_three_bits((zeros - (version == 1)).T)),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)).half(),
            "g_idx": torch.from_numpy(groups).int(),
        }
        return stored, meant

    return replace(how, store=store)


def _three_bits(codes: np.ndarray) -> np.ndarray:
    """AutoGPTQ's three words of 32 codes, of which the codes 10 and 21 lie across two words."""
    runs = codes.reshape(len(codes), -1, 32).astype(np.uint64)
    words = np.zeros((*runs.shape[:2], 3), dtype=np.uint64)
    for i in range(10):
        words[..., 0] |= runs[..., i] << np.uint64(3 * i)
        words[..., 1] |= runs[..., 11 + i] << np.uint64(3 * i + 1)
        words[..., 2] |= runs[..., 22 + i] << np.uint64(3 * i + 2)
    words[..., 0] |= runs[..., 10] << np.uint64(30)
    words[..., 1] |= runs[..., 10] >> np.uint64(2) & np.uint64(1)
    words[..., 1] |= runs[..., 21] << np.uint64(31)
    words[..., 2] |= runs[..., 21] >> np.uint64(1) & np.uint64(3)
    kept = (words & np.uint64(2**32 - 1)).reshape(len(codes), -1)
    return kept.astype(np.uint32).view(np.int32)


def marlin_format(group_size: int) -> Format:
    """Tiles of 16 inputs and outputs in the order in which Marlin's threads take them (`_get_perms`)."""
    perm = []
    for i in range(32):
        rows = [2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1]
        own = [16 * row + i // 4 + 8 * block for block in (0, 1) for row in rows]
        for j in range(4):
            perm += [p + 256 * j for p in own]
    order = np.array(perm).reshape(-1, 8)[:, list(AWQ_SLOTS)].reshape(-1)
    of_groups = [i + 8 * j for i in range(8) for j in range(8)]
    of_rows = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        outputs, inputs = weight.shape
        groups = np.arange(inputs) // (inputs if group_size == -1 else group_size)
        codes, zeros, scales = grouped(weight, 4, groups, symmetric=True, scale_dtype=torch.float16)
        tiles = codes.T.reshape(inputs // 16, 16, outputs // 16, 16).transpose(0, 2, 1, 3)
        tiles = tiles.reshape(-1, 1024)[:, order].reshape(inputs // 16, outputs * 16)
        row_order = of_rows if scales.shape[1] == 1 else of_groups
        ordered = scales.T.reshape(-1, len(row_order))[:, row_order].reshape(-1, outputs)
        stored = {
            "B": torch.from_numpy(pack_words(tiles, 4)),
            "s": torch.from_numpy(np.ascontiguousarray(ordered)).half(),
            "workspace": torch.zeros(outputs // 128 * 16, dtype=torch.int32),
        }
        return stored, (codes - zeros[:, groups]) * scales[:, groups]

    how = gptq_format(4, group_size)
    marlin = {"checkpoint_format": "marlin", "is_marlin_format": True}
    return replace(how, store=store, quantization_config=how.quantization_config | marlin)


def awq_gemv_format(group_size: int) -> Format:
    """AutoAWQ's `gemv`: codes along inputs in their order; zero points and scales filled up to whole words."""

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        groups = np.arange(weight.shape[1]) // group_size
        codes, zeros, scales = grouped(
            weight, 4, groups, symmetric=False, scale_dtype=torch.float16
        )
        filling = ((0, 0), (0, -scales.shape[1] % 8))
        stored = {
            "qweight": torch.from_numpy(pack_words(codes, 4)),
            "qzeros": torch.from_numpy(pack_words(np.pad(zeros, filling), 4)),
            "scales": torch.from_numpy(np.pad(scales, filling)).half(),
        }
        return stored, (codes - zeros[:, groups]) * scales[:, groups]

    how = awq_format(group_size)
    return replace(
        how, store=store, quantization_config=how.quantization_config | {"version": "gemv"}
    )


def auto_round_format(packing: str) -> Format:
    how = gptq_format(4, 128) if packing == "auto_gptq" else awq_format(128)
    config = {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:{packing}",
        "bits": 4,
        "group_size": 128,
        "sym": packing == "auto_gptq",
        "data_type": "int",
    }
    return replace(how, quantization_config=config)


# ---- BitNet


def bitnet_format(kind: str, mode: str = "offline", *, packed: bool = True) -> Format:
    """Ternary weights, which transformers packs; before they are rounded, of `mode` "online"."""

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        values = torch.from_numpy(weight).float()
        scale = values.abs().mean()
        ternary = (values / scale).round().clamp(-1, 1)
        if mode == "online":
            return {"weight": values}, (ternary * scale.half()).double().numpy()
        scale = (1 / scale if kind == "bitlinear" else scale).to(torch.bfloat16)
        meant = ternary / scale.float() if kind == "bitlinear" else ternary * scale.float()
        held = pack_weights(ternary.clone()) if packed else ternary.to(torch.bfloat16)
        return {"weight": held, "weight_scale": scale.reshape(1)}, meant.double().numpy()

    config = {
        "quant_method": "bitnet",
        "linear_class": kind,
        "quantization_mode": mode,
        "modules_to_not_convert": None,
    }
    return Format(config, store)
