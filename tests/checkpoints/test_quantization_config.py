# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagoda.checkpoints.checkpoint_quantization import (
    CheckpointQuantization,
    GroupScheme,
    is_dense_once_loaded,
)
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.fp8_config import Fp8Scheme
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.quantization_config import parse_quantization
from pagoda.checkpoints.weight_formats import (
    MXFP4,
    NVFP4,
    DenseFormat,
    GroupedFormat,
    Int8Format,
)
from pagoda.errors import ConfigError

LAYER = "model.layers.3.mlp.up_proj"
TOKEN_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
CHANNEL_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
GROUP_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
W8A8 = {"targets": ["Linear"], "weights": CHANNEL_INT8, "input_activations": TOKEN_INT8}
W4A16 = {"targets": ["Linear"], "weights": GROUP_INT4, "input_activations": None}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": W8A8},
    "ignore": ["lm_head"],
}
CHANNEL_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
NVFP4_GROUP = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BITNET: dict[str, Any] = {"quant_method": "bitnet"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}
AUTO_ROUND: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def _linear(name: str, inputs: int = 512) -> LinearSpec:
    roles = {"lm_head": LinearRole.HEAD, "model.embed_tokens": LinearRole.EMBEDDING}
    return LinearSpec(name, 64, inputs, roles.get(name, LinearRole.MLP_IN))


def _parse(values: dict[str, Any]) -> CheckpointQuantization:
    parsed = parse_quantization(Fields({"quantization_config": values}, "config.json"))
    assert parsed is not None
    return parsed


def test_no_quantization_and_an_older_name_of_the_field() -> None:
    assert parse_quantization(Fields({}, "config.json")) is None
    values = {name: value for name, value in COMPRESSED.items() if name != "quant_method"}
    parsed = parse_quantization(Fields({"compression_config": values}, "config.json"))
    assert parsed == _parse(COMPRESSED)


def test_compressed_tensors_chooses_by_name_before_kind() -> None:
    groups = {
        "group_0": W8A8 | {"format": "int-quantized"},
        "group_1": W4A16 | {"targets": ["re:.*down_proj$", "model.layers.0.mlp.up_proj"]},
    }
    ignore = ["lm_head", "re:.*self_attn.*"]
    parsed = _parse(
        COMPRESSED | {"format": "pack-quantized", "config_groups": groups, "ignore": ignore}
    )
    packed = GroupScheme(bits=4, group_size=128, symmetric=True, act_order=False)
    assert parsed.scheme_of(_linear("model.layers.7.mlp.down_proj")) == packed
    assert parsed.scheme_of(_linear("model.layers.0.mlp.up_proj")) == packed
    assert parsed.scheme_of(_linear(LAYER)) == Int8Format()
    for dense in ("lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj"):
        assert parsed.scheme_of(_linear(dense)) is None
    assert parsed.summary == "compressed-tensors int8 weights and int4 weights (groups of 128)"
    assert parsed.format_of(_linear("lm_head", 512)) == DenseFormat()


def test_awq_keeps_named_parts_dense() -> None:
    parsed = _parse(AWQ | {"version": "GEMM", "modules_to_not_convert": ["layers.0.", "visual"]})
    assert parsed.scheme_of(_linear("model.layers.0.mlp.up_proj")) is None
    assert parsed.scheme_of(_linear("lm_head")) is None
    assert parsed.format_of(_linear(LAYER, 512)) == GroupedFormat(
        4, 128, offsets=True, act_order=False
    )
    assert parsed.summary == "awq int4 weights (groups of 128)"


def test_gptq() -> None:
    modules = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]
    parsed = _parse(
        GPTQ
        | {"desc_act": True, "group_size": -1, "bits": 8, "modules_in_block_to_quantize": modules}
    )
    assert parsed.format_of(_linear(LAYER, 96)) == GroupedFormat(
        8, 32, offsets=False, act_order=True
    )
    assert parsed.scheme_of(_linear("model.layers.0.mlp.down_proj")) is None
    assert parsed.scheme_of(_linear("lm_head")) is None
    assert parsed.summary == "gptq int8 weights (one group)"
    assert _parse(GPTQ | {"lm_head": True}).scheme_of(_linear("lm_head")) is not None
    assert _parse(GPTQ | {"lm_head": True}).scheme_of(_linear("model.embed_tokens")) is None


@pytest.mark.parametrize("more", [{"fmt": "e5m2"}, {"weight_block_size": [48, 48]}])
def test_fp8_that_no_backend_holds(more: dict[str, Any]) -> None:
    """E5M2, and blocks that kernels cannot take by 32 inputs, become dense also where there are 8-bit floats."""
    parsed = replace(_parse(FP8 | more), keeps_fp8=True)
    assert not parsed.is_held_in_fp8
    assert parsed.format_of(_linear(LAYER)) == DenseFormat()
    assert parsed.summary.endswith(", converted")
    assert replace(_parse(FP8), keeps_fp8=True).is_held_in_fp8


def test_fp8() -> None:
    parsed = _parse(FP8 | {"weight_block_size": [128, 64], "modules_to_not_convert": ["lm_head"]})
    assert parsed.scheme_of(_linear("lm_head")) == Fp8Scheme(128, 64)
    assert parsed.format_of(_linear(LAYER)) == DenseFormat()
    assert parsed.summary == "fp8 weights (blocks of 128 × 64), converted"
    assert _parse(FP8).scheme_of(_linear(LAYER)) == Fp8Scheme(None, None)
    for strategy, more, scheme, shape in (
        ("tensor", {}, Fp8Scheme(None, None), (1, 1)),
        ("channel", {}, Fp8Scheme(1, None), (300, 1)),
        ("group", {"group_size": 64}, Fp8Scheme(1, 64), (300, 8)),
        ("block", {"block_structure": [128, 128]}, Fp8Scheme(128, 128), (3, 4)),
        ("block", {"block_structure": "128x128"}, Fp8Scheme(128, 128), (3, 4)),
    ):
        group = W8A8 | {
            "weights": CHANNEL_FP8 | {"strategy": strategy} | more,
            "input_activations": {"type": "float", "num_bits": 8, "dynamic": False},
        }
        layers = {"format": "float-quantized", "config_groups": {"group_0": group}}
        parsed = _parse(COMPRESSED | layers)
        assert parsed.scheme_of(_linear(LAYER)) == scheme
        assert parsed.scheme_of(_linear("lm_head")) is None
        assert scheme.scales_shape(300, 512) == shape
        assert is_dense_once_loaded(parsed)
    assert is_dense_once_loaded(None)
    assert not is_dense_once_loaded(_parse(AWQ))
    with pytest.raises(ConfigError) as caught:
        _parse(COMPRESSED | {"config_groups": {"group_0": W8A8 | {"weights": CHANNEL_FP8}}})
    assert str(caught.value) == (
        "config.json: quantization_config.format must be 'float-quantized' or 'naive-quantized' or "
        "'mxfp8-quantized' for weights of type float, got 'int-quantized'."
    )


def test_larger_groups_are_held_as_several() -> None:
    def size(stored: int, inputs: int) -> int:
        held = _parse(GPTQ | {"group_size": stored}).format_of(_linear(LAYER, inputs))
        assert isinstance(held, GroupedFormat)
        return held.group_size

    assert [size(32, 768), size(64, 768), size(128, 768)] == [32, 64, 128]
    assert [size(256, 768), size(96, 768), size(-1, 768), size(-1, 160)] == [128, 32, 128, 32]
    with pytest.raises(ConfigError, match=r"up_proj.weight has 100 inputs in one group; Pagoda"):
        size(-1, 100)


SUPPORTED = (
    "must be one that Pagoda reads, compressed-tensors (fp8, int8 weights and inputs, packed int4 and int8 "
    "weights, nvfp4, mxfp4), modelopt (FP8, MXFP8 and NVFP4), fp8, fbgemm_fp8, quark (fp8, int8, mxfp4), "
    "bitsandbytes (nf4, fp4 and int8), awq (4 bits), gptq (2, 3, 4 and 8 bits), auto-round (as these two, mxfp4, "
    "mxfp8, nvfp4), bitnet and mxfp4"
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "fbgemm"}, f"quant_method {SUPPORTED}, got 'fbgemm'."),
        (FP8 | {"fmt": "nf4"}, "fmt must be 'e4m3' or 'e5m2', got 'nf4'."),
        (
            FP8 | {"weight_block_size": [128]},
            "weight_block_size must be two positive integers, the outputs and inputs of a block, got [128].",
        ),
        (
            FP8 | {"weight_block_size": [128, -1]},
            "weight_block_size must be two positive integers, the outputs and inputs of a block, got [128, -1].",
        ),
        ({"bits": 4}, f"quant_method {SUPPORTED}, got None."),
        (
            BITNET | {"use_rms_norm": True},
            "use_rms_norm is not supported; it must be absent or false, got True.",
        ),
        (
            BITNET | {"linear_class": "bit"},
            "linear_class must be 'bitlinear' or 'autobitlinear', got 'bit'.",
        ),
        (
            BITNET | {"quantization_mode": "both"},
            "quantization_mode must be 'offline' or 'online', got 'both'.",
        ),
        (AWQ | {"bits": 3}, "bits must be 4, got 3."),
        (AWQ | {"group_size": 0}, "group_size must be a positive integer, got 0."),
        (
            AWQ | {"modules_to_not_convert": [1]},
            "modules_to_not_convert must be a list of strings, got [1].",
        ),
        (AWQ | {"version": "gemv_fast"}, "version must be 'gemm' or 'gemv', got 'gemv_fast'."),
        (GPTQ | {"bits": 5}, "bits must be 2 or 3 or 4 or 8, got 5."),
        (
            GPTQ | {"checkpoint_format": "bitblas"},
            "checkpoint_format must be 'gptq', 'gptq_v2' or 'marlin', got 'bitblas'.",
        ),
        (
            GPTQ | {"checkpoint_format": "marlin", "sym": False},
            "sym must be true, and desc_act false, in the layout of Marlin, got False.",
        ),
        (
            AUTO_ROUND | {"packing_format": "auto_round:awq_gemm_v9"},
            "packing_format must be 'auto_round:auto_gptq' or 'auto_round:auto_awq' or 'auto_round:gptqmodel' or "
            "'auto_round' or 'auto_round:llm_compressor', got 'auto_round:awq_gemm_v9'.",
        ),
        (
            AUTO_ROUND | {"extra_config": {"(": {"bits": 16}}},
            "extra_config.( must be a name or a valid regular expression, got {'bits': 16}.",
        ),
        (
            AUTO_ROUND | {"data_type": "mx_fp"},
            "data_type must be 'int' in this packing, got 'mx_fp'.",
        ),
        (
            AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"},
            "data_type must be mx_fp of 4 bits, mx_fp of 8 bits, nv_fp of 4 bits in llm-compressor's packing, "
            "got None.",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}},
            "global_quant_config.weight.dtype must, with qscheme, be one that Pagoda reads, fp8_e4m3 per_tensor, "
            "fp8_e4m3 per_channel, int8 per_tensor, int8 per_channel, fp4 per_group, got 'int4'.",
        ),
        (
            {"quant_method": "quark", "layer_type_quant_config": {"Linear": {}}},
            "layer_type_quant_config must be absent or empty, got {'Linear': {}}.",
        ),
        (
            {"quant_method": "quark", "layer_quant_config": {"re:(": None}},
            "layer_quant_config must hold valid regular expressions, not 're:(', got {'re:(': None}.",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1}
                },
            },
            "global_quant_config.weight.ch_axis is not supported; it must be absent or 0, got 1.",
        ),
        (
            MODELOPT | {"quant_algo": "W4A8_AWQ"},
            "quant_algo must be one that Pagoda reads, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, NVFP4, "
            "W4A16_NVFP4, got 'W4A8_AWQ'.",
        ),
        (
            MODELOPT | {"group_size": 32},
            "group_size must be 16, the inputs of a group of NVFP4, got 32.",
        ),
        (
            {"quant_method": "bitsandbytes"},
            "load_in_4bit must be true, or load_in_8bit, but not both, got None.",
        ),
        (
            {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "af4"},
            "bnb_4bit_quant_type must be 'nf4' or 'fp4', got 'af4'.",
        ),
        (
            GPTQ | {"dynamic": {"-:(": {}}},
            "dynamic must hold valid regular expressions, not '(', got {'-:(': {}}.",
        ),
        (
            COMPRESSED | {"config_groups": {}},
            "config_groups must name at least one group of weights, got {}.",
        ),
        (
            COMPRESSED | {"format": "marlin-24"},
            "format must be 'int-quantized' or 'pack-quantized', got 'marlin-24'.",
        ),
        (
            COMPRESSED | {"ignore": ["re:("]},
            "ignore must hold valid regular expressions, not 're:(', got ['re:('].",
        ),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config.format must be 'dense', got 'sparse-bitmask'.",
        ),
        (
            COMPRESSED | {"transform_config": {"R1": {}}},
            "transform_config must be empty, got {'R1': {}}.",
        ),
    ],
)
def test_what_is_not_supported_is_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _parse(values)
    assert str(caught.value) == f"config.json: quantization_config.{message}"


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (
            {"weights": CHANNEL_INT8 | {"type": "complex"}},
            ".weights.type must be 'int' or 'float', got 'complex'.",
        ),
        (
            {"format": "float-quantized", "weights": CHANNEL_FP8 | {"num_bits": 6}},
            ".weights.num_bits must be 8 for weights of type float, got 6.",
        ),
        (
            {"format": "float-quantized", "weights": CHANNEL_FP8 | {"symmetric": False}},
            ".weights.symmetric must be true for weights of type float, got False.",
        ),
        (
            {"format": "float-quantized", "weights": CHANNEL_FP8 | {"strategy": "token"}},
            ".weights.strategy must be 'tensor', 'channel', 'group' or 'block' for weights of type float, ",
        ),
        (
            {"format": "float-quantized", "weights": CHANNEL_FP8 | {"strategy": "block"}},
            ".weights.block_structure must be two positive integers, the outputs and inputs of a block, got None.",
        ),
        (
            {"weights": CHANNEL_INT8 | {"num_bits": 6}},
            ".weights.num_bits must be 4 or 8 in the format int-quantized, got 6.",
        ),
        (
            {"weights": CHANNEL_INT8 | {"strategy": "block"}},
            ".weights.strategy must be 'channel', 'tensor' or 'group' in the format int-quantized, got 'block'.",
        ),
        (
            {"format": "nvfp4-pack-quantized", "weights": NVFP4_GROUP | {"strategy": "group"}},
            ".weights.strategy must be 'tensor_group' in the format nvfp4-pack-quantized, got 'group'.",
        ),
        (
            {"format": "nvfp4-pack-quantized", "weights": NVFP4_GROUP | {"group_size": 32}},
            ".weights.group_size must be 16 in the format nvfp4-pack-quantized, got 32.",
        ),
        (
            {"input_activations": TOKEN_INT8 | {"num_bits": 4}},
            ".input_activations.num_bits must be 8, got 4.",
        ),
        (
            {"format": "pack-quantized", "weights": GROUP_INT4 | {"num_bits": 3}},
            ".weights.num_bits must be 4 or 8, got 3.",
        ),
        (
            {"format": "pack-quantized", "weights": GROUP_INT4 | {"strategy": "block"}},
            ".weights.strategy must be 'group' or 'channel' in the format pack-quantized, got 'block'.",
        ),
    ],
)
def test_groups_that_are_not_supported(group: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _parse(COMPRESSED | {"config_groups": {"group_0": W8A8 | group}})
    prefix = "config.json: quantization_config.config_groups.group_0"
    assert str(caught.value).startswith(prefix + message)


def test_names_that_are_left_out() -> None:
    """Lists of bitsandbytes, modelopt and auto-round, each by its own rules."""
    skipped = ["lm_head", "model.layers.1", "mlp.up_proj"]
    theirs = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "llm_int8_skip_modules": skipped,
    }
    ignored = {"ignore": ["lm_head", "model.layers.1*", "*.mlp.up_proj"]}
    own = {name: {"bits": 16} for name in ("model.layers.1.mlp.down_proj", r".*mlp\.up_proj")}
    more = {"model.layers.1.self_attn.o_proj": {"bits": 8}}
    for values in (theirs, MODELOPT | ignored, AUTO_ROUND | {"extra_config": own | more}):
        parsed = _parse(values)
        assert parsed.scheme_of(_linear("model.layers.1.mlp.down_proj")) is None
        assert parsed.scheme_of(_linear("model.layers.2.mlp.up_proj")) is None
        assert parsed.scheme_of(_linear("lm_head")) is None
        for dense in ("model.layers.11.mlp.down_proj", "model.layers.2.mlp.down_proj"):
            is_star = "ignore" in values and ".11." in dense
            assert (parsed.scheme_of(_linear(dense)) is None) == is_star
    eight = parsed.scheme_of(_linear("model.layers.1.self_attn.o_proj"))
    assert eight == GroupScheme(bits=8, group_size=128, symmetric=True, act_order=False)
    assert parsed.summary == "gptq int8 weights (groups of 128) and int4 weights (groups of 128)"


def test_layers_of_modelopt_that_have_schemes_of_their_own() -> None:
    layers = {"model.layers.3.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    layers |= {"model.layers.3.mlp.down_proj": {"quant_algo": "FP8"}}
    parsed = _parse(MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert parsed.scheme_of(_linear(LAYER)) == NVFP4
    assert parsed.scheme_of(_linear("model.layers.3.mlp.down_proj")) == Fp8Scheme(None, None)
    assert parsed.scheme_of(_linear("model.layers.4.mlp.up_proj")) is None
    assert parsed.format_of(_linear(LAYER, 320)) == replace(NVFP4, block_size=64)
    assert parsed.format_of(_linear(LAYER, 48)) == DenseFormat()


def test_rules_of_gptqmodel() -> None:
    """The first that matches counts, exact names among them."""
    rules = {
        r"+:.*\.2\.mlp": {"bits": 8, "group_size": 32},
        r"-:.*\.[23]\.": {},
        r"^model\.layers\.3\.mlp\.up_proj$": {"bits": 2},
        r"^model\.layers\.4\.mlp\.up_proj$": {"sym": False},
    }
    for prefix in ("model", "model.language_model"):
        own = {rule.replace("model", prefix.replace(".", r"\.")): it for rule, it in rules.items()}
        parsed = _parse(GPTQ | {"dynamic": own})
        usual = GroupScheme(4, 128, symmetric=True, act_order=False)
        assert parsed.scheme_of(_linear("model.layers.1.mlp.up_proj")) == usual
        eight = replace(usual, bits=8, group_size=32)
        assert parsed.scheme_of(_linear("model.layers.2.mlp.up_proj")) == eight
        assert parsed.scheme_of(_linear("model.layers.2.self_attn.q_proj")) is None
        assert parsed.scheme_of(_linear("model.layers.3.mlp.up_proj")) is None
        zeros = parsed.scheme_of(_linear("model.layers.4.mlp.up_proj"))
        assert zeros == replace(usual, symmetric=False)
        listed = {"modules_in_block_to_quantize": [["mlp.up_proj"]], "lm_head": True}
        parsed = _parse(GPTQ | {"dynamic": {**own, "-:lm_head": {}}, **listed})
        assert parsed.scheme_of(_linear("model.layers.1.mlp.up_proj")) == usual
        assert parsed.scheme_of(_linear("model.layers.2.mlp.up_proj")) == eight
        for dense in ("model.layers.3.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head"):
            assert parsed.scheme_of(_linear(dense)) is None
    assert parsed.summary == "gptq int8 weights (groups of 32) and int4 weights (groups of 128)"


def test_lists_of_parts_of_names() -> None:
    """Whole words between dots count, however long the names are; any part of names of AWQ."""
    full = ["model.layers.0.mlp.up_proj", "model.language_model.layers.1.mlp.up_proj"]
    gptq = _parse(GPTQ | {"modules_in_block_to_quantize": [*full, "self_attn"]})
    awq = _parse(AWQ | {"modules_to_not_convert": [*full, "self_attn", "mlp.gate.", "n_pro"]})
    for name in (*full, "model.layers.5.self_attn.q_proj"):
        linear = _linear(name.replace("language_model.", ""))
        assert gptq.scheme_of(linear) is not None
        assert awq.scheme_of(linear) is None
    for name in ("model.layers.2.mlp.up_proj", "model.layers.2.mlp.gate_proj"):
        assert gptq.scheme_of(_linear(name)) is None
        assert awq.scheme_of(_linear(name)) is not None
    assert awq.format_of(_linear("model.layers.2.mlp.down_proj")) == DenseFormat()
    short = _parse(AWQ | {"modules_to_not_convert": ["mlp.gate", "gate", "layers.2"]})
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.21.self_attn.q_proj"):
        assert short.format_of(_linear(name)) == DenseFormat()
    assert short.scheme_of(_linear("model.layers.0.mlp.experts.7.gate_proj")) is not None
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
    assert _parse(older) == _parse(AWQ | {"group_size": 64})


def test_experts_and_algorithms_of_modelopt() -> None:
    layers = {
        "model.language_model.layers.3.mlp.experts": {"quant_algo": "W4A16_NVFP4"},
        "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "fp8"},
        "model.language_model.layers.3.self_attn.k_proj": {"quant_algo": "UNQUANTIZED"},
    }
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    parsed = _parse({"quant_method": "modelopt", "quantization": mixed})
    assert parsed.scheme_of(_linear("model.layers.3.mlp.experts.7.up_proj")) == NVFP4
    assert parsed.scheme_of(_linear("model.layers.3.self_attn.q_proj")) == Fp8Scheme(None, None)
    assert parsed.scheme_of(_linear("model.layers.3.self_attn.k_proj")) is None
    assert _parse(MODELOPT | {"quant_algo": "MXFP8"}).scheme_of(_linear(LAYER)) == Fp8Scheme(1, 32)


KV_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    "values",
    [
        COMPRESSED | {"config_groups": {}, "kv_cache_scheme": KV_FP8},
        COMPRESSED
        | {"config_groups": {"group_0": {"targets": ["LlamaAttention"], "weights": None}}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": KV_FP8},
        {"quant_method": "quark", "global_quant_config": {"weight": None}},
    ],
)
def test_weights_of_checkpoints_that_round_only_k_and_v(values: dict[str, Any]) -> None:
    assert parse_quantization(Fields({"quantization_config": values}, "config.json")) is None


def test_auto_round_in_floats() -> None:
    layers = {"model.layers.3.mlp.up_proj": {"bits": 16, "data_type": "float"}}
    layers |= {"model.layers.4.mlp.up_proj": {"bits": 8, "data_type": "mx_fp"}}
    more = {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp_rceil"}
    parsed = _parse(AUTO_ROUND | more | {"group_size": 32, "extra_config": layers})
    assert parsed.scheme_of(_linear(LAYER)) is None
    assert parsed.scheme_of(_linear("model.layers.4.mlp.up_proj")) == Fp8Scheme(1, 32)
    assert parsed.scheme_of(_linear("model.layers.5.mlp.up_proj")) == MXFP4
    assert _parse(AUTO_ROUND | {"packing_format": "auto_round:gptqmodel"}).layout == "gptq_v2"


def test_quark() -> None:
    def weight(dtype: str, qscheme: str) -> dict[str, Any]:
        return {"weight": {"dtype": dtype, "qscheme": qscheme, "symmetric": None}}

    values = {
        "quant_method": "quark",
        "global_quant_config": weight("fp8_e4m3", "per_tensor"),
        "layer_quant_config": {"*up_proj": weight("fp4", "per_group")},
        "exclude": ["lm_head", "model.layers.1", "re:.*q_proj$"],
    }
    parsed = _parse(values)
    assert parsed.scheme_of(_linear(LAYER)) == MXFP4
    assert parsed.scheme_of(_linear("model.layers.3.mlp.down_proj")) == Fp8Scheme(None, None)
    for dense in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.3.self_attn.q_proj"):
        assert parsed.scheme_of(_linear(dense)) is None
    shells = _parse(values | {"exclude": ["*.[qk]_proj", "model.layers.?.mlp*"]})
    for dense in ("model.layers.3.mlp.down_proj", "model.layers.12.self_attn.k_proj"):
        assert shells.scheme_of(_linear(dense)) is None
    for rounded in ("model.layers.12.mlp.down_proj", "model.layers.3.self_attn.v_proj"):
        assert shells.scheme_of(_linear(rounded)) == Fp8Scheme(None, None)
    channels = values | {"global_quant_config": weight("fp8_e4m3", "per_channel")}
    found = _parse(channels).scheme_of(_linear("model.layers.3.mlp.down_proj"))
    assert found == Fp8Scheme(1, None)
