# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of bitsandbytes, modelopt, auto-round and others answer as the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from driver import answer_differences, load
from more_quantized_models import (
    MODELOPT_FILE,
    auto_round_format,
    awq_gemv_format,
    bitnet_format,
    bitsandbytes_format,
    bitsandbytes_int8_format,
    gptq_stream_format,
    integers_format,
    marlin_format,
    modelopt_blocks_format,
    modelopt_fp8_format,
    modelopt_nvfp4_format,
    mxfp4_format,
    nvfp4_format,
)
from quantized_models import SHAPE, Format, save_quantized, store_quantized
from safetensors.torch import load_file, save_file

from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    LinearWeight,
    dequantize,
    weight_format,
)
from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.errors import ConfigError
from pagoda.model.quantized_checkpoint import QuantizedCheckpoint
from pagoda.model.sharding import LinearShard, take_part
from pagoda.model.weights import open_checkpoint

FORMATS: dict[str, Format] = {
    "nf4": bitsandbytes_format("nf4"),
    "nf4-nested": bitsandbytes_format("nf4", nested=True),
    "nf4-in-bfloat16": bitsandbytes_format("nf4", block_size=128, storage=torch.bfloat16),
    "fp4": bitsandbytes_format("fp4", nested=True),
    "llm-int8": bitsandbytes_int8_format(),
    "nvfp4": nvfp4_format(),
    "modelopt-nvfp4": modelopt_nvfp4_format(),
    "modelopt-nvfp4-beside": modelopt_nvfp4_format(beside=True),
    "modelopt-fp8": modelopt_fp8_format(),
    "modelopt-blocks-fp8": modelopt_blocks_format(),
    "mxfp4": mxfp4_format(),
    "int8-static": integers_format(8, "channel", dynamic=False),
    "int8-zeros": integers_format(8, "channel", symmetric=False),
    "int8-tensor": integers_format(8, "tensor"),
    "int4-bytes": integers_format(4, "group"),
    "int4-bytes-zeros": integers_format(4, "group", symmetric=False),
    "int8-bytes-groups": integers_format(8, "group"),
    "gptq-int2": gptq_stream_format(2, 64, symmetric=False),
    "gptq-int2-act-order": gptq_stream_format(2, 128, act_order=True),
    "gptq-int3": gptq_stream_format(3, 128),
    "gptq-int3-zeros": gptq_stream_format(3, 64, symmetric=False, version=2),
    "marlin": marlin_format(128),
    "marlin-channel": marlin_format(-1),
    "awq-gemv": awq_gemv_format(64),
    "auto-round-gptq": auto_round_format("auto_gptq"),
    "auto-round-awq": auto_round_format("auto_awq"),
    "bitnet": bitnet_format("autobitlinear"),
    "bitnet-plain": bitnet_format("autobitlinear", packed=False),
    "bitnet-inverse": bitnet_format("bitlinear"),
    "bitnet-online": bitnet_format("autobitlinear", "online"),
}
_OFFSET, _HALF = 2**-10, 2**-11
_ROUNDED = {
    **{"nf4": (0.0031, 0), "nf4-nested": (0.0031, 0), "nf4-in-bfloat16": (0.0031, 0)},
    "fp4": (0.0034, 0),
    **dict.fromkeys(("nvfp4", "modelopt-nvfp4", "modelopt-nvfp4-beside"), (0, _HALF)),
    **dict.fromkeys(("int8-zeros", "int4-bytes-zeros", "gptq-int3-zeros"), (_OFFSET, 0)),
    "bitnet-inverse": (0, _HALF),
    **dict.fromkeys(("gptq-int2", "gptq-int2-act-order"), (_OFFSET, 0)),
    **dict.fromkeys(("awq-gemv", "auto-round-awq"), (_OFFSET, 0)),
}
"""Shares of a weight's highest number, and of itself, by which a number is rounded in memory; others are not."""


def _save(directory: Path, name: str) -> tuple[Any, dict[str, np.ndarray]]:
    saved = save_quantized(directory, FORMATS[name])
    if name.endswith("beside"):
        (directory / "hf_quant_config.json").write_text(json.dumps(MODELOPT_FILE))
    return saved


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_answers(name: str, backend: str, tmp_path: Path) -> None:
    model, meant = _save(tmp_path, name)
    quantization = read_model_config(tmp_path).quantization
    assert quantization is not None
    of_highest, of_itself = _ROUNDED.get(name, (0, 0))
    for module, expected in meant.items():
        weight, linear = _linear(tmp_path, module, *expected.shape)
        bound = np.abs(expected).max() * of_highest
        actual = dequantize(weight).numpy()
        np.testing.assert_allclose(actual, expected, rtol=max(of_itself, 1e-6), atol=bound)
        assert weight_format(weight) == quantization.format_of(linear)
    differences = answer_differences(load(tmp_path, backend=backend), model)
    assert differences.mean() < 0.04
    assert differences.max() < 0.25


@pytest.mark.parametrize("name", ["bitnet", "bitnet-inverse", "bitnet-online"])
def test_bitnet_as_transformers_loads_it(name: str, tmp_path: Path) -> None:
    """Both round inputs to 8 bits, transformers with one scale for a row."""
    torch.manual_seed(1)
    sizes = {key: it for key, it in SHAPE.items() if key != "head_dim"}
    config = transformers.BitNetConfig(**sizes, tie_word_embeddings=True)
    store_quantized(transformers.BitNetForCausalLM(config), tmp_path, FORMATS[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert "BitLinear" in type(model.model.layers[0].mlp.up_proj).__name__
    torch.compiler.set_stance("force_eager")
    try:
        differences = answer_differences(load(tmp_path, backend="cpu"), model)
    finally:
        torch.compiler.set_stance("default")
    assert differences.mean() < 0.04
    assert differences.max() < 0.25


@pytest.mark.parametrize("name", ["nf4-nested", "llm-int8", "nvfp4", "gptq-int2", "gptq-int3"])
def test_experts(name: str, tmp_path: Path) -> None:
    model, _ = save_quantized(tmp_path, FORMATS[name], experts=True)
    differences = answer_differences(load(tmp_path, backend="cpu"), model)
    assert differences.mean() < 0.06
    # A rounded input may change a close choice of experts, and with it more at that token.
    assert differences.amax(dim=1).median() < 0.25


@pytest.mark.parametrize(
    "name", ["nf4", "nvfp4", "mxfp4", "llm-int8", "gptq-int2", "gptq-int3", "bitnet"]
)
def test_parts_of_ranks(name: str, tmp_path: Path) -> None:
    """Ranks hold rows and columns of the same numbers, in the same bits."""
    _, meant = save_quantized(tmp_path, FORMATS[name])
    module = "model.layers.0.mlp.down_proj"
    weight, linear = _linear(tmp_path, module, *meant[module].shape)
    whole = dequantize(weight)
    for outputs, inputs in (
        (range(256), range(256, 512)),
        (range(64, 128), range(512)),
        (range(256), range(160, 320)),
    ):
        part = LinearShard(outputs, inputs)
        held = take_part(linear, weight, part, torch.float32)
        own = whole[outputs.start : outputs.stop, inputs.start : inputs.stop]
        assert not isinstance(held, DenseWeight)
        assert torch.equal(dequantize(held), own)


def test_layers_that_are_not_quantized_after_all(tmp_path: Path) -> None:
    """The types of tensors decide, where a list has left a layer out."""
    model, meant = save_quantized(tmp_path, FORMATS["nf4"])
    name = "model.layers.0.mlp.up_proj"
    path = tmp_path / "model.safetensors"
    kept = {key: it for key, it in load_file(path).items() if not key.startswith(name)}
    save_file(kept | {f"{name}.weight": torch.from_numpy(meant[name]).float()}, path)
    assert isinstance(_linear(tmp_path, name, 512, 256)[0], DenseWeight)
    assert answer_differences(load(tmp_path, backend="cpu"), model).mean() < 0.04


def test_rows_that_no_block_divides(tmp_path: Path) -> None:
    """They become plain numbers: 24 inputs, whose blocks of 64 lie across rows."""
    weight = np.random.default_rng(1).normal(size=(40, 24))
    for how in (bitsandbytes_format("nf4", nested=True), bitsandbytes_format("fp4")):
        save_quantized(tmp_path, how)
        stored, meant = how.store(weight)
        save_file(
            {f"odd.{end}": it.contiguous() for end, it in stored.items()},
            tmp_path / "model.safetensors",
        )
        held, _ = _linear(tmp_path, "odd", 40, 24)
        assert isinstance(held, DenseWeight)
        np.testing.assert_allclose(held.values.numpy(), meant, rtol=1e-6, atol=1e-8)


def test_blocks_across_rows(tmp_path: Path) -> None:
    how, weight = bitsandbytes_format("nf4"), np.random.default_rng(1).normal(size=(40, 96))
    save_quantized(tmp_path, how)
    stored, meant = how.store(weight)
    save_file(
        {f"odd.{end}": it.contiguous() for end, it in stored.items()},
        tmp_path / "model.safetensors",
    )
    held, _ = _linear(tmp_path, "odd", 40, 96)
    assert isinstance(held, BlockWeight)
    np.testing.assert_allclose(
        dequantize(held).numpy(), meant, rtol=0, atol=0.003 * np.abs(weight).max()
    )


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "nf4",
            {"weight": torch.zeros(99, 1, dtype=torch.uint8)},
            f"FILE: tensor {Q_PROJ}.weight has 99 bytes, config.json calls for 32768.",
        ),
        (
            "nf4",
            {"weight.quant_map": torch.zeros(16)},
            f"FILE: tensor {Q_PROJ}.weight.quant_map must hold the numbers of nf4.",
        ),
        (
            "nf4",
            {"weight.absmax": torch.full((1024,), torch.inf)},
            f"FILE: tensor {Q_PROJ}.weight.absmax holds scales that are not finite in float16.",
        ),
        (
            "nf4",
            {"weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)},
            f"FILE: tensor {Q_PROJ}.weight.quant_state.bitsandbytes__nf4 must hold a JSON object.",
        ),
        (
            "nf4",
            {"weight.quant_state.bitsandbytes__nf4": torch.tensor([*b'{"shape": [1, 2]}']).byte()},
            f"FILE: tensor {Q_PROJ}.weight.quant_state.bitsandbytes__nf4: shape must be [256, 256], as "
            "config.json calls for, got [1, 2].",
        ),
        (
            "nvfp4",
            {"weight_global_scale": torch.tensor([1e9])},
            f"FILE: tensor {Q_PROJ}.weight_global_scale makes 1e-09 of one, which must be from 2^-21 to 256.",
        ),
        (
            "nvfp4",
            {"weight_scale": torch.full((256, 16), torch.nan).to(torch.float8_e4m3fn)},
            f"FILE: tensor {Q_PROJ}.weight_scale holds scales that are not finite in float16.",
        ),
        (
            "llm-int8",
            {"SCB": torch.full((256,), torch.nan)},
            f"FILE: tensor {Q_PROJ}.SCB holds scales that are not finite in float32.",
        ),
        (
            "bitnet",
            {"weight": torch.zeros(63, 256, dtype=torch.uint8)},
            f"FILE: tensor {Q_PROJ}.weight has shape [63, 256], config.json calls for [64, 256].",
        ),
        (
            "bitnet-plain",
            {"weight": torch.full((256, 256), 2.0)},
            f"FILE: tensor {Q_PROJ}.weight must hold -1, 0 and 1 alone.",
        ),
        (
            "bitnet-inverse",
            {"weight_scale": torch.zeros(1)},
            f"FILE: tensor {Q_PROJ}.weight_scale holds scales that are not finite in float32.",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_one_sentence(
    name: str, changes: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    save_quantized(tmp_path, FORMATS[name])
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {f"{Q_PROJ}.{end}": it for end, it in changes.items()}, path)
    with pytest.raises(ConfigError) as caught:
        _linear(tmp_path, Q_PROJ, 256, 256)
    assert str(caught.value) == message.replace("FILE", str(path))


def _linear(
    directory: Path, name: str, outputs: int, inputs: int
) -> tuple[LinearWeight, LinearSpec]:
    quantization = read_model_config(directory).quantization
    assert quantization is not None
    linear = LinearSpec(name, outputs, inputs, LinearRole.MLP_IN)
    with open_checkpoint(directory) as tensors:
        source = QuantizedCheckpoint(tensors, quantization)
        return source.linear(linear, torch.float32), linear
