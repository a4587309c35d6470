# SPDX-License-Identifier: Apache-2.0
"""GGUF files of families that the converter changes in ways of their own answer as transformers does."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from driver import Driver, answer_differences, in_float64, load, rounding
from family_models import FAMILIES, make_model
from gguf import GGMLQuantizationType as Kind
from gguf_families import OF_MAKERS, ROWS, SEEING, save_family
from gguf_files import finish
from own_code_models import make_like
from tiny_models import continuation
from tiny_models import make_model as make_tiny

from pagoda.backend.weights import BlockWeight, DenseWeight, LinearWeight, dequantize
from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.model.gguf_weights import GgufWeights
from pagoda.model.sharding import least_block_size

PROMPT = [random.Random(0).randrange(320) for _ in range(100)]
_PHIMOE = FAMILIES["phimoe"][1]
SIZES: dict[str, dict[str, Any]] = {
    "glm4-moe-groups": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "gemma3n": {"vocab_size_per_layer_input": 320},
    "gpt2-new": {"n_inner": None},
    "gpt-neox-sequential": {"hidden_act": "gelu"},
    "phimoe": {
        "router_jitter_noise": 0.01,
        "rope_parameters": {**_PHIMOE["rope_parameters"], "short_mscale": 1.4},
    },
    "minicpm3": {
        **{"v_head_dim": 16, "num_key_value_heads": 4, "scale_emb": 12, "scale_depth": 1.4},
        "dim_model_base": 256,
    },
    "falcon-groups": {"ffn_hidden_size": None},
    "falcon-h1": {"mamba_norm_before_gate": False},
    "mimo-v2": {"n_shared_experts": 0, "n_routed_experts": 6},
    "bamba": {"mamba_proj_bias": False},
}
"""Other sizes where a file cannot say those of the family."""
_LAYERS = ["mamba", "E", "mamba", "attention", "mamba", "E", "attention"]
SIZES |= {
    name: {
        "layers_block_type": [kind.replace("E", behind) for kind in _LAYERS],
        "initializer_range": 0.2,
    }
    for name, behind in (
        ("hybrid-nemotron", "moe"),
        ("hybrid-nemotron-dense", "mlp"),
        ("hybrid-nemotron-latent", "moe"),
    )
}


def make(name: str, **sizes: Any) -> transformers.PreTrainedModel:
    """The model of a row, with other sizes."""
    if name in SEEING:
        return make_tiny(name)
    if name in OF_MAKERS:
        return make_like(name)
    return make_model(name.removesuffix("-dense"), **{**SIZES.get(name, {}), **sizes})


@pytest.mark.parametrize("name", [*ROWS, *OF_MAKERS, *SEEING])
def test_files_answer_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = make(name)
    save_family(model, tmp_path / "m.gguf", {**ROWS, **OF_MAKERS, **SEEING}[name])
    size = least_block_size(gguf_model_config(read_gguf(tmp_path / "m.gguf")), 4)
    options = {"max_model_len": 224, "block_size": max(16, 1 << (size - 1).bit_length())}
    runner = load(tmp_path / "m.gguf", dtype="float32", **options)
    driver = Driver(runner)
    driver.start(0, PROMPT)
    driver.run([0], 32)
    assert driver.output(0) == continuation(model, PROMPT, 32)
    exact = in_float64(model)
    runner = load(tmp_path / "m.gguf", dtype="float32", **options)
    assert answer_differences(runner, exact).max() < max(5e-5, rounding(model, exact))


QUANTIZED = ("mamba", "mamba2", "jamba", "falcon-h1", "hybrid-nemotron", "gemma3n", "gemma4")
QUANTIZED += ("gemma4-plain", "gemma4-moe", "dbrx", "gpt2-new", "bloom", "afmoe", "ling2")
QUANTIZED += ("mimo-v2", "kimi-linear-sparse", "plamo2", "jais")
"""Families whose maps lie in files in a way that others' do not."""
_ROUND: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 64, "intermediate_size": 128},
    "mamba2": {"hidden_size": 64, "head_dim": 16},
    "jamba": {"hidden_size": 64},
    "falcon-h1": {"hidden_size": 64, "mamba_d_ssm": 64, "mamba_d_head": 8},
    **{key: {"head_dim": 32, "global_head_dim": 64} for key in ("gemma4", "gemma4-plain")},
    "gemma4-moe": {"head_dim": 32, "global_head_dim": 64, "moe_intermediate_size": 32},
    "mimo-v2": {
        "hidden_size": 256,
        "head_dim": 96,
        "v_head_dim": 64,
    },  # a block of 256 is of four heads
}
"""Sizes of which blocks of 32 are parts."""


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    """Maps out of a quantized file are those out of one with the numbers that its blocks stand for."""
    row = {**ROWS, **OF_MAKERS}[name]
    kind = Kind.Q6_K if name == "mimo-v2" else Kind.Q8_0
    save_family(make(name, **_ROUND.get(name, {})), tmp_path / "blocks.gguf", row, lambda _: kind)
    reader = gguf.GGUFReader(tmp_path / "blocks.gguf")
    plain = gguf.GGUFWriter(tmp_path / "plain.gguf", row.architecture)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            plain.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        plain.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    finish(plain)
    files = [read_gguf(tmp_path / f"{it}.gguf") for it in ("blocks", "plain")]
    spec, (blocks, floats) = gguf_model_config(files[0]), map(GgufWeights, files)
    experts = range(spec.experts.num_stored if spec.experts else 0)
    layers = (spec.layer_linears(at, experts) for at in range(spec.num_layers))
    count = 0
    for linear in itertools.chain(spec.outer_linears, *layers):
        weight = blocks.linear(linear, torch.float32)
        count += isinstance(weight, BlockWeight)
        assert torch.equal(values_of(weight), values_of(floats.linear(linear, torch.float32))), (
            linear.name
        )
    assert count > spec.num_layers
    assert files[0].tensors["token_embd.weight"].type.name == kind.name


def values_of(weight: LinearWeight) -> torch.Tensor:
    return weight.values if isinstance(weight, DenseWeight) else dequantize(weight)
