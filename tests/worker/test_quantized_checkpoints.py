# SPDX-License-Identifier: Apache-2.0
"""Ready-made quantized checkpoints answer as transformers does on the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from driver import answer_differences, load
from quantized_models import (
    Format,
    awq_format,
    fp8_format,
    fp8_tensors_format,
    gptq_format,
    int8_format,
    packed_format,
    save_quantized,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda.backend.weights import (
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantize,
)
from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.fp8_config import Fp8Scheme
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.errors import ConfigError
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.fp8_weights import convert_fp8, is_finite
from pagoda.model.quantization import QuantizationOnLoad
from pagoda.model.quantized_checkpoint import QuantizedCheckpoint
from pagoda.model.weights import open_checkpoint
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker

FORMATS: dict[str, Format] = {
    "int8": int8_format(),
    "int8-flat": int8_format(flat_scales=True),
    "int8-compression-config": int8_format(top="compression_config"),
    "packed-int4-g128": packed_format(4, 128),
    "packed-int4-g32": packed_format(4, 32, scale_dtype=torch.float16),
    "packed-int4-g64-zeros": packed_format(4, 64, symmetric=False),
    "packed-int4-channel": packed_format(4, -1),
    "packed-int4-float32-scales": packed_format(4, 128, scale_dtype=torch.float32),
    "packed-int8-channel": packed_format(8, -1),
    "packed-int8-g128-zeros": packed_format(8, 128, symmetric=False, scale_dtype=torch.float16),
    "packed-int4-g256": packed_format(4, 256),
    "packed-int4-act-order": packed_format(4, 32, act_order=True),
    "packed-int4-head": packed_format(4, 128, ignore=()),
    "awq-g128": awq_format(128),
    "awq-g64": awq_format(64),
    "awq-channel": awq_format(-1),
    "gptq-g128": gptq_format(4, 128),
    "gptq-int8-g32": gptq_format(8, 32),
    "gptq-zeros": gptq_format(4, 128, symmetric=False),
    "gptq-v2-zeros": gptq_format(4, 64, symmetric=False, version=2),
    "gptq-int8-zeros": gptq_format(8, 128, symmetric=False),
    "gptq-act-order": gptq_format(4, 64, act_order=True),
    "gptq-act-order-zeros": gptq_format(4, 128, act_order=True, symmetric=False),
    "gptq-channel": gptq_format(4, -1),
    "gptq-head": gptq_format(4, 128, head=True),
    "fp8-tensor": fp8_tensors_format("tensor", flat_scales=True),
    "fp8-tensor-static": fp8_tensors_format("tensor", dynamic=False, scale_dtype=torch.float32),
    "fp8-channel": fp8_tensors_format("channel"),
    "fp8-channel-flat-e5m2": fp8_tensors_format(
        "channel", flat_scales=True, stored_as=torch.float8_e5m2
    ),
    "fp8-group": fp8_tensors_format("group", scale_dtype=torch.float16),
    "fp8-block": fp8_tensors_format("block"),
    "fp8-head": fp8_tensors_format("channel", ignore=()),
    "fp8-method-block": fp8_format((128, 128)),
    "fp8-method-block-cut": fp8_format((96, 80), scale_dtype=torch.bfloat16),
    "fp8-method-block-powers-of-two": fp8_format((128, 128), scale_dtype=torch.float8_e8m0fnu),
    "fp8-method-tensor": fp8_format(None, scheme="static", scales_name="weight_scale"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_answers(name: str, tmp_path: Path) -> None:
    model, meant = save_quantized(tmp_path, FORMATS[name])
    for module, expected in meant.items():
        weight = _linear(tmp_path, module, *expected.shape)
        actual = dequantize(weight).double().numpy()
        if isinstance(weight, GroupedWeight) and weight.offsets is not None:
            rounded = weight.offsets.abs().max().item() * 2**-11
            np.testing.assert_allclose(actual, expected, rtol=0, atol=rounded * 1.01)
        else:
            rounded = 2**-11 if name == "packed-int4-float32-scales" else 1e-7
            np.testing.assert_allclose(actual, expected, rtol=rounded, atol=0)
    _assert_answers_alike(tmp_path, model)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("fp8")])
def test_8_bit_floats_are_kept_exactly(name: str, tmp_path: Path) -> None:
    """All but E5M2, and blocks that kernels cannot take by 32 inputs, which become dense."""
    _, meant = save_quantized(tmp_path, FORMATS[name])
    for module, expected in meant.items():
        weight = _linear(tmp_path, module, *expected.shape, keeps_fp8=True)
        is_dense = name.endswith(("e5m2", "block-cut"))
        assert isinstance(weight, DenseWeight if is_dense else Fp8Weight)
        np.testing.assert_allclose(dequantize(weight).double().numpy(), expected, rtol=1e-7, atol=0)


def test_kept_8_bit_floats_are_reckoned_so(tmp_path: Path) -> None:
    save_quantized(tmp_path, fp8_format((128, 128)))
    options = {"dtype": "bfloat16", "num_blocks": 64, "backend": "reference"}
    plan = plan_worker(WorkerConfig(model=str(tmp_path), **options))
    shard = plan.shard
    tables = 2 * shard.config.vocab_size * shard.config.hidden_size
    in_bfloat16 = shard.weight_bytes(None, 2) - 2 * tables
    assert in_bfloat16 // 2 < plan.weight_bytes - 2 * tables < in_bfloat16 * 0.55
    loaded = load_runner(plan, Tracer("worker"))
    assert "bfloat16, fp8 weights (blocks of 128 × 128), " in loaded.ready.summary
    assert "converted" not in loaded.ready.summary


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("fp8")])
def test_kernels_multiply_8_bit_floats(name: str, tmp_path: Path) -> None:
    model, _ = save_quantized(tmp_path, FORMATS[name])
    for dtype in ("float32", "bfloat16"):
        differences = answer_differences(load(tmp_path, backend="cpu", dtype=dtype), model)
        assert differences.mean() < (1e-5 if dtype == "float32" else 0.04)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_fp8_asked_for_of_fp8_is_what_is_stored(quantization: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, fp8_format((128, 128)))
    options = {"backend": "reference", "quantization": quantization, "num_blocks": 64}
    plan = plan_worker(WorkerConfig(model=str(tmp_path), **options))
    assert plan.quantization is not None
    assert plan.quantization.summary == "fp8 weights (blocks of 128 × 128)"


def test_fp8_asked_for_of_blocks_that_no_backend_holds_is_made_anew(tmp_path: Path) -> None:
    save_quantized(tmp_path, fp8_format((48, 48)))
    options = {"backend": "reference", "quantization": "fp8", "num_blocks": 64}
    plan = plan_worker(WorkerConfig(model=str(tmp_path), **options))
    assert plan.quantization == QuantizationOnLoad(None, in_fp8=True)


def test_8_bit_floats_of_a_dense_checkpoint(tmp_path: Path) -> None:
    model, _ = save_quantized(tmp_path, fp8_format(None))
    model.save_pretrained(tmp_path / "dense")
    runner = load(tmp_path / "dense", backend="reference", quantization="fp8")
    differences = answer_differences(runner, model)
    assert 0 < differences.mean() < 0.1
    native = load(tmp_path / "dense", backend="cpu", quantization="fp8")
    assert (answer_differences(native, model) - differences).abs().max() < 1e-4


def test_8_bit_floats_are_not_kept_where_all_is_dequantized(tmp_path: Path) -> None:
    save_quantized(tmp_path, fp8_format((128, 128)))
    options = {"dtype": "float32", "num_blocks": 64, "backend": "reference", "dequantizes": True}
    plan = plan_worker(WorkerConfig(model=str(tmp_path), **options))
    assert plan.weight_bytes == plan.shard.weight_bytes(None, 4)


@pytest.mark.parametrize(
    "name",
    ["int8", "packed-int4-g32", "awq-g64", "gptq-g128", "gptq-act-order", "fp8-method-block"],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_experts(name: str, backend: str, tmp_path: Path) -> None:
    model, meant = save_quantized(tmp_path, FORMATS[name], experts=True)
    expert = "model.layers.1.mlp.experts.5.down_proj"
    actual = dequantize(_linear(tmp_path, expert, *meant[expert].shape)).double().numpy()
    np.testing.assert_allclose(actual, meant[expert], rtol=1e-6, atol=2e-3 if "awq" in name else 0)
    differences = answer_differences(load(tmp_path, backend=backend), model)
    assert differences.mean() < 0.04
    # A rounded input may change a close choice of experts, and with it more at that token.
    assert differences.amax(dim=1).median() < 0.2


def test_int8_weights_of_magnitude_128_become_127(tmp_path: Path) -> None:
    _, meant = save_quantized(tmp_path, int8_format())
    name, shape = next((name, weight.shape) for name, weight in meant.items())
    _change(tmp_path, {f"{name}.weight": torch.full(shape, -128, dtype=torch.int8)})
    weight = _linear(tmp_path, name, *shape)
    assert isinstance(weight, Int8Weight)
    assert bool((weight.values == -127).all())


def test_some_maps_may_be_dense(tmp_path: Path) -> None:
    ignore = ("lm_head", r"re:.*\.mlp\..*", "model.layers.1.self_attn.v_proj")
    how = packed_format(4, 128, ignore=ignore)
    model, meant = save_quantized(tmp_path, how)
    dense = {
        f"{name}.weight": torch.from_numpy(weight).float()
        for name, weight in meant.items()
        if ".mlp." in name or name == "model.layers.1.self_attn.v_proj"
    }
    assert len(dense) == 7
    _change(tmp_path, dense)
    _assert_answers_alike(tmp_path, model)


def _change(directory: Path, tensors: Mapping[str, Tensor | None]) -> None:
    path = directory / "model.safetensors"
    kept = load_file(path) | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, path)


Q_PROJ = "model.layers.0.self_attn.q_proj"
PACKED, ORDERED = packed_format(4, 128), gptq_format(4, 128, act_order=True)
FP8 = fp8_format((128, 128))


@pytest.mark.parametrize(
    ("how", "changes", "message"),
    [
        (
            PACKED,
            {"weight_packed": torch.zeros(256, 31, dtype=torch.int32)},
            f"FILE: tensor {Q_PROJ}.weight_packed has shape [256, 31], "
            "config.json calls for [256, 32].",
        ),
        (
            PACKED,
            {"weight_packed": torch.zeros(256, 128, dtype=torch.uint8)},
            f"FILE: tensor {Q_PROJ}.weight_packed is stored as U8; Pagoda reads int32.",
        ),
        (
            PACKED,
            {"weight_scale": None},
            f"DIRECTORY: no file holds the tensor {Q_PROJ}.weight_scale, which config.json calls for.",
        ),
        (
            PACKED,
            {"weight_scale": torch.full((256, 2), 1e5)},
            f"FILE: tensor {Q_PROJ}.weight_scale holds scales that are not finite in float16.",
        ),
        (
            PACKED,
            {"weight_shape": torch.tensor([256, 2**60])},
            f"FILE: {Q_PROJ}.weight_shape says [256, {2**60}], config.json calls for [256, 256].",
        ),
        (
            int8_format(),
            {"weight_scale": torch.full((256, 1), torch.nan)},
            f"FILE: tensor {Q_PROJ}.weight_scale holds scales that are not finite in float32.",
        ),
        (
            awq_format(128),
            {"scales": torch.full((2, 256), 60000.0)},
            f"FILE: tensor {Q_PROJ}.qzeros holds scales that are not finite in float16.",
        ),
        (
            FP8,
            {"weight_scale_inv": None},
            f"DIRECTORY: no file holds the tensor {Q_PROJ}.weight_scale, which config.json calls for.",
        ),
        (
            FP8,
            {"weight_scale_inv": torch.ones(2, 3)},
            f"FILE: tensor {Q_PROJ}.weight_scale_inv has shape [2, 3], config.json calls for [2, 2].",
        ),
        (
            FP8,
            {"weight_scale_inv": torch.full((2, 2), torch.inf)},
            f"FILE: tensor {Q_PROJ}.weight_scale_inv holds scales that are not finite in float32.",
        ),
        (
            FP8,
            {"weight": torch.full((256, 256), torch.nan).to(torch.float8_e4m3fn)},
            f"FILE: tensor {Q_PROJ}.weight holds numbers that are not finite.",
        ),
        (
            FP8,
            {"weight": torch.full((256, 256), -torch.inf).to(torch.float8_e5m2)},
            f"FILE: tensor {Q_PROJ}.weight holds numbers that are not finite.",
        ),
        (
            FP8,
            {"weight": torch.zeros(256, 256, dtype=torch.int8)},
            f"FILE: tensor {Q_PROJ}.weight is stored as I8; "
            "Pagoda reads float32, bfloat16, float16, float8_e4m3fn, float8_e5m2.",
        ),
        (
            ORDERED,
            {"g_idx": torch.zeros(256, dtype=torch.int32)},
            f"FILE: {Q_PROJ}.g_idx must put 128 inputs into each of 2 groups.",
        ),
        (
            ORDERED,
            {"g_idx": (torch.arange(256) % 2).int()},
            f"{Q_PROJ} and model.layers.0.self_attn.k_proj have the same inputs but group them in "
            "different orders (act-order); quantize them with one order.",
        ),
        (
            ORDERED,
            {"g_idx": None},
            f"DIRECTORY: no file holds the tensor {Q_PROJ}.g_idx, which config.json calls for.",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_one_sentence(
    how: Format, changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    save_quantized(tmp_path, how)
    _change(tmp_path, {f"{Q_PROJ}.{kind}": tensor for kind, tensor in changes.items()})
    expected = message.replace("FILE", str(tmp_path / "model.safetensors"))
    assert _refusal(tmp_path) == expected.replace("DIRECTORY", str(tmp_path))


def _refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(directory, backend="reference", **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("group_size", "message"),
    [
        (
            96,
            "model.layers.0.self_attn.q_proj.weight has 256 inputs, which groups of 96 do not divide; "
            "the number of inputs must be a multiple of the group size.",
        ),
        (
            16,
            "model.layers.0.self_attn.q_proj.weight has groups of 16 inputs; "
            "Pagoda computes with groups of 32, 64, 128 or multiples of them.",
        ),
    ],
)
def test_group_sizes_that_do_not_fit(group_size: int, message: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, awq_format(128))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["group_size"] = group_size
    path.write_text(json.dumps(config))
    assert _refusal(tmp_path) == message


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_fp8_may_be_quantized_anew(quantization: str, tmp_path: Path) -> None:
    model, _ = save_quantized(tmp_path / "fp8", fp8_format((128, 128)))
    model.save_pretrained(tmp_path / "dense")
    loaded = [
        load(tmp_path / name, backend="cpu", dtype="float32", quantization=quantization)
        for name in ("fp8", "dense")
    ]
    differences = [answer_differences(runner, model) for runner in loaded]
    assert torch.equal(*differences)
    assert differences[0].any()


def test_transformers_converts_fp8_to_the_same_weights(tmp_path: Path) -> None:
    save_quantized(tmp_path, FP8)
    quantization = transformers.FineGrainedFP8Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization, dtype=torch.float32
    )
    theirs = {name: weight for name, weight in model.named_parameters() if "_proj.weight" in name}
    assert len(theirs) == 14
    for name, weight in theirs.items():
        ours = _linear(tmp_path, name.removesuffix(".weight"), *weight.shape)
        assert isinstance(ours, DenseWeight)
        assert torch.equal(ours.values, weight)


def test_all_numbers_of_8_bits() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.tensor([[0.75]])
    for stored_as in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = codes.view(stored_as)
        finite = values.float().isfinite()
        assert [is_finite(value[None]) for value in values] == finite.tolist()
        converted = convert_fp8(values[None, finite], scales, Fp8Scheme(None, None), torch.float32)
        assert torch.equal(converted[0], values[finite].float() * 0.75)


def test_fp8_is_reckoned_as_what_it_becomes(tmp_path: Path) -> None:
    save_quantized(tmp_path, fp8_format((48, 48)))
    plan = plan_worker(WorkerConfig(model=str(tmp_path), dtype="bfloat16", num_blocks=64))
    assert plan.weight_bytes == plan.shard.weight_bytes(None, 2)
    ready = load_runner(plan, Tracer("worker")).ready
    assert "bfloat16, fp8 weights (blocks of 48 × 48), converted, " in ready.summary


def test_nothing_is_quantized_twice_or_made_up(tmp_path: Path) -> None:
    save_quantized(tmp_path, awq_format(128))
    assert _refusal(tmp_path, quantization="int8") == (
        f"{tmp_path} is quantized already (awq int4 weights (groups of 128)); leave out --quantization."
    )
    assert _refusal(tmp_path, load_format="dummy") == (
        f"{tmp_path}/config.json: there are no dummy weights for its quantization_config; "
        "take that out and add --quantization int8 or int4."
    )


def _linear(
    directory: Path, name: str, outputs: int, inputs: int, *, keeps_fp8: bool = False
) -> LinearWeight:
    quantization = read_model_config(directory).quantization
    assert quantization is not None
    with open_checkpoint(directory) as tensors:
        source = QuantizedCheckpoint(tensors, replace(quantization, keeps_fp8=keeps_fp8))
        return source.linear(LinearSpec(name, outputs, inputs, LinearRole.MLP_IN), torch.float32)


def _assert_answers_alike(directory: Path, model: Any) -> None:
    differences = answer_differences(load(directory, backend="reference"), model)
    assert differences.mean() < 0.04
    assert differences.max() < 0.2
