# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints as tools write them and people upload them answer as the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from driver import answer_differences, load
from family_models import make_model
from more_quantized_models import modelopt_fp8_format, mxfp4_format, nvfp4_format
from published_models import as_published
from quantized_models import (
    Format,
    Stored,
    awq_format,
    compressed_tensors,
    fp8_format,
    fp8_tensors_format,
    gptq_format,
    packed_format,
    save_quantized,
)
from safetensors.torch import load_file, save_file

from pagoda.backend.weights import dequantize
from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.errors import ConfigError
from pagoda.model.quantized_checkpoint import QuantizedCheckpoint
from pagoda.model.weights import open_checkpoint


def _mxfp8(config: dict[str, Any]) -> Format:
    """Groups of 32 with a byte that is an exponent."""
    how = fp8_tensors_format("group")

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        groups = weight.reshape(len(weight), -1, 32)
        exponents = np.ceil(np.log2(np.abs(groups).max(2) / 448))
        spread = 2.0 ** exponents[..., None]
        values = torch.from_numpy(groups / spread).to(torch.float8_e4m3fn)
        stored = {
            "weight": values.reshape(weight.shape),
            "weight_scale": torch.from_numpy(exponents + 127).to(torch.uint8),
        }
        return stored, (values.double().numpy() * spread).reshape(weight.shape)

    return replace(how, store=store, quantization_config=config)


def _fbgemm() -> Format:
    how = fp8_tensors_format("channel", scale_dtype=torch.float32)
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    return replace(how, quantization_config=config | {"modules_to_not_convert": ["lm_head"]})


def _quark(how: Format, dtype: str, qscheme: str) -> Format:
    weight = {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": None}
    config = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "layer_quant_config": {"*v_proj": {"weight": weight, "output_tensors": weight}},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"},
    }
    return replace(how, quantization_config=config)


def _gptq_with_rules() -> Format:
    """GPTQModel's `dynamic`: maps of 512 inputs have 8 bits."""
    four, eight = gptq_format(4, 128), gptq_format(8, 32)
    rules = {r"+:.*\.down_proj": {"bits": 8, "group_size": 32}, "-:.*visual.*": {}, "lm_head": {}}

    def store(weight: np.ndarray) -> tuple[Stored, np.ndarray]:
        return (eight if weight.shape[1] == 512 else four).store(weight)

    config = four.quantization_config | {"dynamic": rules}
    return replace(four, store=store, quantization_config=config)


_MX_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
_AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}
FORMATS: dict[str, Format] = {
    "fbgemm-fp8": _fbgemm(),
    "quark-fp8": _quark(modelopt_fp8_format(), "fp8_e4m3", "per_tensor"),
    "quark-mxfp4": _quark(mxfp4_format(), "fp4", "per_group"),
    "mxfp8": _mxfp8(compressed_tensors("mxfp8-quantized", _MX_WEIGHTS, None)),
    "modelopt-mxfp8": _mxfp8({"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "auto-round-nvfp4": replace(
        nvfp4_format(),
        quantization_config=_AUTO_ROUND | {"data_type": "nv_fp", "bits": 4, "group_size": 16},
    ),
    "gptq-rules": _gptq_with_rules(),
}


@pytest.mark.parametrize("name", FORMATS)
def test_answers(name: str, tmp_path: Path) -> None:
    model, _ = save_quantized(tmp_path, FORMATS[name])
    differences = answer_differences(load(tmp_path, backend="cpu"), model)
    assert differences.mean() < (1e-4 if "fp8" in name else 0.04)
    assert differences.max() < 0.25


@pytest.mark.parametrize("how", [gptq_format(4, 128), awq_format(128)])
def test_files_beside_config_json(how: Format, tmp_path: Path) -> None:
    """Tools of 2023 say there how weights are quantized; those of GPTQ have biases of zeros everywhere."""
    model, meant = save_quantized(tmp_path, replace(how, quantization_config={}))
    config = dict(how.quantization_config)
    method = config.pop("quant_method")
    renamed = {"bits": "w_bit", "group_size": "q_group_size"} if method == "awq" else {}
    name = "quant_config.json" if method == "awq" else "quantize_config.json"
    (tmp_path / name).write_text(
        json.dumps({renamed.get(key, key): value for key, value in config.items()})
    )
    path = tmp_path / "model.safetensors"
    biases = {f"{module}.bias": torch.zeros(len(weight)) for module, weight in meant.items()}
    scales = {
        "model.layers.0.self_attn.kv_scale": torch.ones(1),
        "model.layers.1.self_attn.qkv_proj.k_scale": torch.ones(1),
    }
    save_file(biases | scales | load_file(path), path)
    assert answer_differences(load(tmp_path, backend="cpu"), model).mean() < 0.04


# ---- experts


def _save(family: str, directory: Path) -> transformers.PreTrainedModel:
    """A model in its makers' files, with the order of theirs."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "intermediate_size": 96}
    model = make_model(family, **sizes, head_dim=32, num_attention_heads=4)
    model.save_pretrained(directory)
    if family == "qwen3-vl-moe":
        as_published(directory)
    return model


def _set_config(directory: Path, how: Format) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_bytes()) | {"quantization_config": how.quantization_config}
    path.write_text(json.dumps(config))


def _apart(tensors: dict[str, torch.Tensor], stored: Callable[[str], bool]) -> None:
    """Takes experts [experts, inputs, outputs] apart, as tools do before they quantize."""
    for name in [name for name in tensors if stored(name)]:
        stem, _, kind = name.rpartition(".")
        for expert, values in enumerate(tensors.pop(name).transpose(1, 2)):
            parts = values.chunk(2) if kind == "gate_up_proj" else [values]
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, own in zip(parts, names, strict=True):
                tensors[f"{stem}.{expert}.{own}.weight"] = part.contiguous()


@pytest.mark.parametrize("family", ["qwen3-vl-moe", "llama4"])
def test_experts_that_a_tool_took_apart(family: str, tmp_path: Path) -> None:
    model = _save(family, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    _apart(tensors, lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    assert sum(".experts.1." in name for name in tensors) >= 6
    save_file(tensors, path)
    assert answer_differences(load(tmp_path, backend="cpu"), model).max() < 5e-5


def test_experts_in_the_order_of_transformers(tmp_path: Path) -> None:
    """Version 5 writes [experts, outputs, inputs] of Qwen3-VL, and reads both."""
    model = make_model("qwen3-vl-moe")
    model.save_pretrained(tmp_path)
    assert answer_differences(load(tmp_path, backend="cpu"), model).max() < 5e-5


@pytest.mark.parametrize("is_static", [False, True])
def test_experts_of_fp8_in_one_tensor(is_static: bool, tmp_path: Path) -> None:
    """Qwen3-VL's own files: [experts, inputs, outputs], and scales of blocks in the same order."""
    model = _save("qwen3-vl-moe", tmp_path)
    path = tmp_path / "model.safetensors"
    how = fp8_format(None if is_static else (32, 16))
    tensors, exact = load_file(path), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts = [how.store(it.t().double().numpy()) for it in tensors[name]]
        exact[name] = torch.stack([torch.from_numpy(meant).float().t() for _, meant in experts])
        tensors[name] = torch.stack([stored["weight"].t() for stored, _ in experts])
        scales = torch.stack([stored["weight_scale_inv"] for stored, _ in experts])
        tensors[f"{name}_scale_inv"] = scales.view(-1, 1, 1) if is_static else scales.mT
        if is_static:
            tensors[f"{name}_activation_scale"] = torch.ones(len(experts))
    assert exact
    save_file({key: it.contiguous() for key, it in (load_file(path) | exact).items()}, path)
    oracle = type(model).from_pretrained(tmp_path).float().eval()
    save_file({key: it.contiguous() for key, it in tensors.items()}, path)
    _set_config(tmp_path, how)
    assert answer_differences(load(tmp_path, backend="cpu"), oracle).mean() < 1e-4
    for name, scales in tensors.items():
        if name.endswith("scale_inv"):
            scales[-1] = torch.nan
    save_file({key: it.contiguous() for key, it in tensors.items()}, path)
    _check_last_expert(tmp_path)


def _check_last_expert(directory: Path) -> None:
    """Its scales are looked at when it is read, and not for each of the others."""
    config = read_model_config(directory)
    assert config.experts is not None
    count = config.experts.routing.num_experts
    layer = next(at for at in range(config.num_layers) if config.expert_linears(at, range(count)))
    *others, last = config.expert_linears(layer, range(count)).experts
    with open_checkpoint(directory) as opened:
        source = QuantizedCheckpoint(opened, config.quantization)
        for linear in (it for expert in others for it in expert):
            source.linear(linear, torch.float32)
        for linear in last:
            with pytest.raises(ConfigError, match="holds scales that are not finite in float32"):
                source.linear(linear, torch.float32)


def test_zero_points_of_one_group(tmp_path: Path) -> None:
    """Their words are a matrix of one column, which torch gives any stride (gates of Qwen3-Next)."""
    how = packed_format(4, 32, symmetric=False)
    save_quantized(tmp_path, how)
    weight = np.random.default_rng(1).normal(size=(8, 96))
    stored, meant = how.store(weight)
    save_file(
        {f"few.{end}": it.contiguous() for end, it in stored.items()},
        tmp_path / "model.safetensors",
    )
    quantization = read_model_config(tmp_path).quantization
    assert quantization is not None
    with open_checkpoint(tmp_path) as tensors:
        source = QuantizedCheckpoint(tensors, quantization)
        held = source.linear(LinearSpec("few", 8, 96, LinearRole.MLP_IN), torch.float32)
    np.testing.assert_allclose(dequantize(held).numpy(), meant, atol=2e-3)


def test_experts_in_one_tensor_of_other_formats_are_refused(tmp_path: Path) -> None:
    _save("qwen3-vl-moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    save_file(tensors | {name: tensors[name].to(torch.uint8)}, path)
    _set_config(tmp_path, nvfp4_format())
    with pytest.raises(ConfigError, match=r"in one tensor, which Pagoda reads of fp8 alone\.$"):
        load(tmp_path, backend="cpu")
