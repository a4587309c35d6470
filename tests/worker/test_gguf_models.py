# SPDX-License-Identifier: Apache-2.0
"""Models in GGUF files have the weights that the `gguf` package reads, and answer as transformers does."""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from driver import Driver, answer_differences, load, load_config
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf_files import finish
from gguf_models import save_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, continuation, make_model, save_model

from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    dequantize,
)
from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.gguf.config import gguf_model_config, stored_format
from pagoda.checkpoints.gguf.reader import BLOCK_TYPES, read_gguf
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.errors import ConfigError
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.ggml_blocks import linear_weight
from pagoda.model.gguf_weights import GgufWeights

IN_GGUF = [name for name in FAMILIES if "windowed" not in name and name != "qwen3-moe-mixed"]
"""A GGUF file cannot say that only some layers have windows or experts."""

TYPES = (
    *(Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_0, Kind.Q5_1, Kind.Q5_K),
    *(Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4),
    *(Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S),
    *(Kind.TQ1_0, Kind.TQ2_0, Kind.NVFP4),
)

# ---- weights


def _weights(path: Path) -> GgufWeights:
    file = read_gguf(path)
    return GgufWeights(file)


def _save_layers(path: Path, kind: Kind) -> dict[str, np.ndarray]:
    """One layer of a Llama whose matrices are all of one type; returns them as the package reads them."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    return save_gguf(make_model("llama", **sizes), path, lambda _: kind)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_quantized_weights_are_those_of_the_package(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    expected = _save_layers(path, kind)["blk.0.ffn_down.weight"]
    weight = _weights(path).linear(
        LinearSpec("blk.0.ffn_down", 256, 512, LinearRole.MLP_OUT), torch.bfloat16
    )
    assert isinstance(weight, BlockWeight)
    assert weight.stored_format == stored_format(BLOCK_TYPES[kind])
    assert int(weight.codes.max()) < 2**weight.stored_format.bits
    np.testing.assert_array_equal(dequantize(weight).numpy(), expected)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_weights_come_in_the_dtype_of_activations(
    kind: Kind, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "one.gguf"
    expected = torch.from_numpy(_save_layers(path, kind)["token_embd.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = _weights(path).linear(
            LinearSpec("token_embd", 320, 256, LinearRole.EMBEDDING), dtype
        )
    assert isinstance(weight, DenseWeight)
    assert weight.values.dtype == dtype
    assert torch.equal(weight.values, expected.to(dtype))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, *TYPES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_of_queries_and_keys_are_put_back(kind: Kind, name: str, tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    expected = _save_layers(path, kind)[f"blk.0.attn_{name}.weight"]
    if name != "v":
        neighbours = expected.reshape(-1, 32, 2, 256)
        expected = neighbours.transpose(0, 2, 1, 3).reshape(expected.shape)
    config = gguf_model_config(read_gguf(path))
    linear = dict(zip("qkv", config.attention_linears(0)[:3], strict=True))[name]
    weight = _weights(path).linear(linear, torch.float32)
    np.testing.assert_array_equal(dequantize(weight).numpy(), expected)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_blocks_of_any_bytes_are_those_of_the_package(kind: Kind) -> None:
    """All scales and minima that finite halves allow, the smallest too."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(kind).integers(0, 256, (64, num_bytes), dtype=np.uint8)
    if kind is Kind.MXFP4:  # float16 holds these scales
        blocks[:, 0] = 104 + blocks[:, 0] % 40
    if kind is Kind.NVFP4:  # nobody writes signs of scales
        blocks[:, :4] &= 127
    with np.errstate(invalid="ignore"):
        expected = gguf.dequantize(blocks, kind)
    finite = np.isfinite(expected).all(axis=1)
    assert finite.sum() > 32
    weight = linear_weight(torch.from_numpy(blocks[finite]), BLOCK_TYPES[kind], torch.float32)
    np.testing.assert_array_equal(dequantize(weight).numpy(), expected[finite])


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_nvfp4_has_a_scale_for_all_of_a_matrix(family: str, tmp_path: Path) -> None:
    """Experts have one each. Scales of inputs are not read."""
    sizes = {"intermediate_size": 192, "num_hidden_layers": 1}
    if family == "qwen3-moe":
        sizes["moe_intermediate_size"] = 192
    model = make_model(family, **sizes)
    stored = save_gguf(model, tmp_path / "plain.gguf", _nvfp4)
    writer = GGUFWriter(tmp_path / "m.gguf", family.replace("-", ""))
    scales = {}
    for name in [it for it in stored if _nvfp4(it) is Kind.NVFP4]:
        count = len(stored[name]) if stored[name].ndim > 2 else 1
        scales[name] = (np.arange(count, dtype=np.float32) + 1) / 64
        for end in ("scale", "input_scale"):
            writer.add_tensor(name.replace("weight", end), scales[name])
    _copy(tmp_path / "plain.gguf", writer)
    spec, weights = gguf_model_config(read_gguf(tmp_path / "m.gguf")), _weights(tmp_path / "m.gguf")
    count = 0
    for linear in spec.layer_linears(0, range(spec.experts.num_stored if spec.experts else 0)):
        name, place = f"{linear.stored.tensor}.weight", linear.stored.first // linear.outputs
        if name in scales:
            expected = stored[name].reshape(-1, linear.outputs, linear.inputs)[place]
            weight = weights.linear(linear, torch.float32)
            assert isinstance(weight, BlockWeight)
            np.testing.assert_array_equal(dequantize(weight), expected * scales[name][place])
            count += 1
    assert count == sum(map(len, scales.values())) > 0


def _nvfp4(name: str) -> Kind:
    return Kind.NVFP4 if "ffn_down" in name else Kind.F32


@pytest.mark.parametrize("number", [0.0, float("nan"), 1e9])
def test_a_scale_that_is_of_no_use(number: float, tmp_path: Path) -> None:
    model = make_model("qwen3", intermediate_size=192, num_hidden_layers=1)
    save_gguf(model, tmp_path / "plain.gguf", _nvfp4)
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen3")
    writer.add_tensor("blk.0.ffn_down.scale", np.array([number], dtype=np.float32))
    _copy(tmp_path / "plain.gguf", writer)
    with pytest.raises(ConfigError, match=r"blk.0.ffn_down.scale holds .*, which must be from"):
        load(tmp_path / "m.gguf")


# ---- models


@pytest.mark.parametrize("family", IN_GGUF)
def test_the_config_is_that_of_the_directory(family: str, tmp_path: Path) -> None:
    save_gguf(save_model(family, tmp_path), tmp_path / "m.gguf")
    config, expected = (
        gguf_model_config(read_gguf(tmp_path / "m.gguf")),
        read_model_config(tmp_path),
    )
    assert config.norm.eps == pytest.approx(expected.norm.eps)
    file_says = {"names": config.names, "dtype": "bfloat16", "norm": config.norm}
    if family == "llama3-rope":  # a tensor of factors instead of a scaling
        file_says["rotary"] = config.rotary
    assert config == replace(expected, **file_says)


@pytest.mark.parametrize("family", IN_GGUF)
def test_greedy_answers_are_those_of_transformers(
    family: str, backend: str, tmp_path: Path
) -> None:
    model = make_model(family)
    save_gguf(model, tmp_path / "m.gguf")
    prompt = [random.Random(0).randrange(320) for _ in range(100)]
    driver = Driver(load(tmp_path / "m.gguf", backend=backend, dtype="float32"))
    driver.start(0, prompt)
    driver.run([0], 48)
    assert driver.output(0) == continuation(model, prompt, 48)


def _mixed(name: str) -> Kind:
    """Types as in files that call themselves Q4_K_M: some matrices have more bits than others."""
    if name.startswith(("token_embd", "output")):
        return Kind.Q8_0
    if "attn_v" in name:
        return Kind.Q5_0
    return Kind.Q5_1 if "ffn_down" in name else Kind.Q4_1


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mistral"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "NVFP4", "mixed"])
def test_quantized_models_answer_as_their_weights_say(
    family: str, kind: str, backend: str, tmp_path: Path
) -> None:
    """The oracle has the dequantized weights; activations are rounded too, so logits are only close."""
    model = make_model(family, hidden_size=192, intermediate_size=192, initializer_range=0.06)
    path = tmp_path / "m.gguf"
    _load_stored(model, save_gguf(model, path, _mixed if kind == "mixed" else lambda _: Kind[kind]))
    differences = answer_differences(load(path, backend=backend, dtype="float32"), model)
    assert differences.mean() < 0.02
    assert differences.max() < 0.1


def _load_stored(model: Any, stored: dict[str, np.ndarray]) -> None:
    config = model.config
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH["LLAMA" if config.model_type == "mistral" else config.model_type.upper()], 9
    )
    for name, parameter in model.named_parameters():
        values = torch.from_numpy(stored[names.get_name(name, (".weight", ".bias"))])
        heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
        for part, count in heads.items():
            if config.model_type == "mistral" and part in name:
                pairs = values.reshape(count, -1, 2, *values.shape[1:])
                values = pairs.transpose(1, 2).reshape(values.shape)
        parameter.data.copy_(values)


def test_parts_are_loaded_as_one_model(tmp_path: Path) -> None:
    model = make_model("qwen3")
    save_gguf(model, tmp_path / "whole.gguf")
    writer = GGUFWriter(
        tmp_path / "parts.gguf", "qwen3", split_max_tensors=9, small_first_shard=True
    )
    _copy(tmp_path / "whole.gguf", writer)
    assert len(list(tmp_path.glob("parts-*.gguf"))) > 2
    prompt = list(range(50, 90))
    driver = Driver(load(next(iter(sorted(tmp_path.glob("parts-*.gguf")))), dtype="float32"))
    driver.start(0, prompt)
    driver.run([0], 16)
    assert driver.output(0) == continuation(model, prompt, 16)


def test_dense_files_may_be_quantized_and_others_not(tmp_path: Path) -> None:
    save_gguf(make_model("llama"), tmp_path / "dense.gguf", lambda _: Kind.F16)
    config = WorkerConfig(
        model=str(tmp_path / "dense.gguf"), num_blocks=64, num_threads=1, quantization="int8"
    )
    assert "int8 weights" in load_config(config)[1].summary
    save_gguf(make_model("llama"), tmp_path / "packed.gguf", lambda _: Kind.Q4_0)
    packed = msgspec.structs.replace(config, model=str(tmp_path / "packed.gguf"))
    config = msgspec.structs.replace(packed, quantization="none")
    assert "bfloat16, GGUF Q4_0 weights, " in load_config(config)[1].summary
    with pytest.raises(ConfigError, match=r"packed\.gguf is quantized already \(GGUF Q4_0 weights"):
        load_config(packed)


# ---- files that are wrong


def _keep(name: str, data: np.ndarray) -> np.ndarray | None:  # noqa: ARG001
    return data


def _copy(
    path: Path,
    writer: GGUFWriter,
    change: Callable[[str, np.ndarray], np.ndarray | None] = _keep,
    added: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes the same file with other tensors; None takes one away."""
    reader = gguf.GGUFReader(path)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        data = change(tensor.name, tensor.data)
        if data is not None:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    for name, data in (added or {}).items():
        writer.add_tensor(name, data)
    finish(writer)


def _refused(
    directory: Path,
    change: Callable[[str, np.ndarray], np.ndarray | None] = _keep,
    **added: np.ndarray,
) -> str:
    """What is said of the file of a model with other tensors."""
    save_gguf(make_model("llama"), directory / "whole.gguf", lambda _: Kind.Q8_0)
    path = directory / "changed.gguf"
    _copy(directory / "whole.gguf", GGUFWriter(path, "llama"), change, added)
    with pytest.raises(ConfigError) as caught:
        load(path, dtype="float32")
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("blk.1.ffn_up.weight", lambda _: None, "lacks the tensor blk.1.ffn_up.weight."),
        ("output_norm.weight", lambda _: None, "lacks the tensor output_norm.weight."),
        ("blk.0.attn_k.bias", lambda _: None, "lacks the tensor blk.0.attn_k.bias."),
        (
            "blk.0.ffn_gate.weight",
            lambda data: data[:32],
            "tensor blk.0.ffn_gate.weight has shape [32, 64], the metadata calls for [96, 64].",
        ),
        (
            "blk.0.attn_q.weight",
            lambda data: np.full_like(data, 255),
            "blk.0.attn_q.weight has scales that are not finite.",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_one_sentence(
    name: str,
    change: Callable[[np.ndarray], np.ndarray | None],
    message: str,
    tmp_path: Path,
) -> None:
    text = _refused(tmp_path, lambda found, data: change(data) if found == name else data)
    assert text.endswith(message)


@pytest.mark.parametrize(
    "name",
    [
        *("output.bias", "output_norm.bias", "blk.0.attn_norm.bias", "blk.0.attn_q_norm.bias"),
        *("blk.0.ffn_gate_inp.bias", "blk.9.attn_norm.weight", "blk.1.shortconv.conv.bias"),
    ],
)
def test_biases_that_nothing_would_add(name: str, tmp_path: Path) -> None:
    text = _refused(tmp_path, **{name: np.ones(64, dtype=np.float32)})
    assert f"has a tensor {name!r}, which is in no model" in text


def test_biases_of_every_layer_count(tmp_path: Path) -> None:
    """The first layer has biases of queries, keys and values."""

    def change(name: str, data: np.ndarray) -> np.ndarray | None:
        return None if name.startswith("blk.0.attn_") and name.endswith(".bias") else data

    whole = tmp_path / "whole.gguf"
    assert "attn_v.bias" in _refused(
        tmp_path, lambda name, data: None if name == "blk.1.attn_v.bias" else data
    )
    path = tmp_path / "first.gguf"
    _copy(whole, GGUFWriter(path, "llama"), change, {})
    flags = [layer.attention.qkv_bias for layer in gguf_model_config(read_gguf(path)).layers]
    assert flags == [False, True]


def test_tensors_that_no_model_has(tmp_path: Path) -> None:
    text = _refused(tmp_path, **{"blk.0.attn_sinks.weight": np.zeros(9, dtype=np.float32)})
    assert "has a tensor 'blk.0.attn_sinks.weight', which is in no model" in text
    for factor in (0.0, -1.0, math.nan, math.inf):
        factors = {"rope_freqs.weight": np.full(8, factor, dtype=np.float32)}
        text = _refused(tmp_path, **factors)
        assert text.endswith("tensor rope_freqs.weight must hold positive numbers.")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_flipped_bytes_are_refused_or_loaded(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "whole.gguf"
    if not path.exists():
        save_gguf(make_model("llama3-rope"), path, lambda _: Kind.Q8_0)
    rng, data = random.Random(seed), bytearray(path.read_bytes())
    header = min(tensor.start for tensor in read_gguf(path).tensors.values())
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(8, header)] = rng.choice((0, 1, 0xFF, rng.randrange(256)))
    flipped = path.with_name("flipped.gguf")
    flipped.write_bytes(data)
    with contextlib.suppress(ConfigError):
        load(flipped, dtype="float32", max_model_len=1, num_blocks=8)


def test_weights_of_experts_are_renormalized_as_files_say(tmp_path: Path) -> None:
    save_gguf(make_model("qwen3-moe"), tmp_path / "whole.gguf")
    for said in (True, False):
        path = tmp_path / f"{said}.gguf"
        writer = GGUFWriter(path, "qwen3moe")
        writer.add_bool("qwen3moe.expert_weights_norm", said)
        _copy(tmp_path / "whole.gguf", writer)
    gguf_model_config(read_gguf(tmp_path / "True.gguf"))
    with pytest.raises(
        ConfigError, match=r"qwen3moe\.expert_weights_norm is not supported; .* true"
    ):
        gguf_model_config(read_gguf(tmp_path / "False.gguf"))
