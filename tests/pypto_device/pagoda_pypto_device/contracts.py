# SPDX-License-Identifier: Apache-2.0
"""Contracts of the programs that the device runs: Qwen3-14B's, and smaller ones of the same form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHAPES: Mapping[str, Mapping[str, Any]] = {
    # Two of the 40 layers of Qwen/Qwen3-14B.
    "qwen3-14b-2l": {
        "dtype": "bf16",
        "sizes": {"L": 2, "H": 5120, "QH": 40, "KVH": 8, "D": 128, "I": 17408},
        "vocabulary": (151936, 152064),
        "max_seq": 4096,
        "prefill_tokens": 16 * 4096,
    },
    "qwen3-small": {
        "dtype": "bf16",
        "sizes": {"L": 2, "H": 160, "QH": 10, "KVH": 2, "D": 32, "I": 544},
        "vocabulary": (960, 1024),
        "max_seq": 1024,
        "prefill_tokens": 4096,
    },
    **{
        f"tiny-{dtype}": {
            "dtype": dtype,
            "sizes": {"L": 4, "H": 256, "QH": 4, "KVH": 2, "D": 64, "I": 768},
            "vocabulary": (960, 1024),
            "max_seq": 2048,
            "prefill_tokens": 16 * 2048,
        }
        for dtype in ("fp32", "bf16")
    },
}


def manifest(names: tuple[str, ...], version: int) -> dict[str, object]:
    """What the library says of itself."""
    return {
        "schema_version": version,
        "library": "pagoda-pypto-device 1.0",
        "driver": {"at_least": "25.2", "below": "26"},
        "contracts": [contract(name) for name in names],
    }


def contract(name: str) -> dict[str, object]:
    """A contract as data."""
    shape = SHAPES[name]
    real, padded = shape["vocabulary"]
    dtype = shape["dtype"]
    return {
        "name": name,
        "sizes": {**shape["sizes"], "REAL_V": real, "V": padded, "IDS": 8},
        "eps": 1e-6,
        "limits": {
            "window": 16,
            "max_batch": 16,
            "max_seq": shape["max_seq"],
            "page": 128,
            "prefill_tokens": shape["prefill_tokens"],
            "topk": 32,
        },
        "programs": {
            "prefill": {"args": _prefill(dtype)},
            "decode": {"args": _decode(dtype)},
            "topk_select": {"args": _TOPK},
        },
        "topologies": [
            {"chips": 1, "ring_task_window": 1024, "ring_heap": 1 << 20, "ring_dep_pool": 4096},
            {"chips": 2, "ring_task_window": 2048, "ring_heap": 1 << 21, "ring_dep_pool": 8192},
        ],
    }


def _arg(name: str, dtype: str, shape: str, meaning: str, **others: object) -> dict[str, object]:
    dims = shape.split()
    return {"name": name, "dtype": dtype, "shape": dims, "meaning": meaning, **others}


def _weights(dtype: str) -> dict[str, dict[str, object]]:
    args = [
        _arg("input_rms_weight", "fp32", "L H", "attention_norms"),
        _arg("wq", dtype, "L*H QH*D", "w_q", split="QH"),
        _arg("wk", dtype, "L*H KVH*D", "w_k", split="KVH"),
        _arg("wv", dtype, "L*H KVH*D", "w_v", split="KVH"),
        _arg("q_norm_weight", "fp32", "L D", "q_norms"),
        _arg("k_norm_weight", "fp32", "L D", "k_norms"),
        _arg("rope_cos", "fp32", "S D", "rope_cos"),
        _arg("rope_sin", "fp32", "S D", "rope_sin"),
        _arg("wo", dtype, "L*QH*D H", "w_o", split="QH"),
        _arg("w_gate", dtype, "L*H I", "w_gate", split="I"),
        _arg("w_up", dtype, "L*H I", "w_up", split="I"),
        _arg("w_down", dtype, "L*I H", "w_down", split="I"),
        _arg("post_rms_weight", "fp32", "L H", "mlp_norms"),
        _arg("final_norm_weight", "fp32", "1 H", "final_norm"),
        _arg("lm_head_weight", dtype, "V H", "head", split="V", pad="first_row"),
        _arg("embed_weight", dtype, "V H", "embedding"),
        _arg("k_cache", dtype, "L*PAGES*KVH*PAGE D", "keys", split="KVH", direction="inout"),
        _arg("v_cache", dtype, "L*PAGES*KVH*PAGE D", "values", split="KVH", direction="inout"),
    ]
    return {str(arg["name"]): arg for arg in args}


_OUT = _arg("out", "fp32", "B V", "logits", direction="out")


def _prefill(dtype: str) -> list[dict[str, object]]:
    """The arguments of `qwen3_prefill_host` of pypto-lib, in its order."""
    known = _weights(dtype) | {
        "input_ids": _arg("input_ids", "int32", "T", "tokens"),
        "seq_lens": _arg("seq_lens", "int32", "B", "seq_lens"),
        "chunk_lens": _arg("chunk_lens", "int32", "B", "chunk_lens"),
        "chunk_offsets": _arg("chunk_offsets", "int32", "B", "chunk_offsets"),
        "block_table": _arg("block_table", "int32", "B*BLOCKS", "block_table", fill=-1),
        "slot_mapping": _arg("slot_mapping", "int32", "T", "slot_mapping"),
        "out": _OUT,
    }
    order = (
        "input_ids seq_lens chunk_lens chunk_offsets input_rms_weight wq wk wv q_norm_weight k_norm_weight "
        "rope_cos rope_sin block_table slot_mapping k_cache v_cache wo w_gate w_up w_down post_rms_weight "
        "final_norm_weight lm_head_weight embed_weight out"
    )
    return [known[name] for name in order.split()]


def _decode(dtype: str) -> list[dict[str, object]]:
    """The arguments of `qwen3_decode_host` of pypto-lib, in its order."""
    known = _weights(dtype) | {
        "seq_lens": _arg("seq_lens", "int32", "B", "seq_lens"),
        "block_table": _arg("block_table", "int32", "B*BLOCKS", "block_table", fill=0),
        "slot_mapping": _arg("slot_mapping", "int32", "B", "slot_mapping"),
        "out": _OUT,
        "sampled_ids_in": _arg("sampled_ids_in", "int32", "B IDS", "tokens"),
        "sampled_ids": _arg("sampled_ids", "int32", "B IDS", "sampled", direction="out"),
        "next_hidden": _arg("next_hidden", "bf16", "B H", "next_hidden", direction="out"),
    }
    order = (
        "input_rms_weight wq wk wv q_norm_weight k_norm_weight seq_lens block_table slot_mapping rope_cos "
        "rope_sin k_cache v_cache wo w_gate w_up w_down post_rms_weight final_norm_weight lm_head_weight out "
        "embed_weight sampled_ids_in sampled_ids next_hidden"
    )
    return [known[name] for name in order.split()]


_TOPK = [
    _arg("logits", "fp32", "WINDOW V", "logits"),
    _arg("sampling_control", "int32", "2", "control"),
    _arg("topk_values", "fp32", "WINDOW K", "topk_values", direction="out"),
    _arg("topk_indices", "int32", "WINDOW K", "topk_indices", direction="out"),
]
