# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagoda.checkpoints.config_json import parse_model_config, read_model_config
from pagoda.checkpoints.families import FAMILIES
from pagoda.checkpoints.layer_spec import MlpSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.refused import REFUSED
from pagoda.checkpoints.rope import LinearScaling, Llama3Scaling, RotarySpec, YarnScaling
from pagoda.errors import ConfigError
from pagoda.model.sharding import whole

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
MIXTRAL = {"architectures": ["MixtralForCausalLM"]}
MOE = {"architectures": ["Qwen3MoeForCausalLM"]}
ENCODERS = [name for name in FAMILIES if name.startswith(("Bert", "XLMRoberta"))]
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


def parse(**changes: Any) -> Any:
    values = {name: value for name, value in (BASE | changes).items() if value is not ...}
    return parse_model_config(values, source="config.json")


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def test_a_minimal_file_takes_the_usual_values() -> None:
    config = parse()
    assert (config.norm.eps, config.rotary) == (1e-6, {"default": RotarySpec(32, 10_000.0)})
    assert (config.tie_word_embeddings, config.dtype) == (False, "float32")
    assert windows(config) == [None, None, None]
    assert config.num_heads == 2 * config.num_kv_heads


_BIASED_QKV = (
    *("Qwen2ForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM", "SeedOssForCausalLM"),
    *("Qwen2MoeForCausalLM", "MiMoForCausalLM", "QWenLMHeadModel"),
)
_BIASED = (
    *("GptOssForCausalLM", "PhiForCausalLM", "Starcoder2ForCausalLM", "Jais2ForCausalLM"),
    *("PersimmonForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTNeoXForCausalLM"),
    *("OPTForCausalLM", "BloomForCausalLM"),
)
_LAYER_NORMS = (
    *("CohereForCausalLM", "Cohere2ForCausalLM", "StableLmForCausalLM", "OlmoForCausalLM"),
    *("PhiForCausalLM", "Starcoder2ForCausalLM", "NemotronForCausalLM", "Jais2ForCausalLM"),
    *("PersimmonForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTNeoXForCausalLM"),
    *("GPTJForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "FalconForCausalLM"),
    *("MptForCausalLM", "OrionForCausalLM", "PhimoeForCausalLM", "DbrxForCausalLM"),
)
_PARALLEL = ("Cohere", "PhiFor", "GPTNeoX", "GPTJ", "Falcon")
_SPARSE = (
    *("Qwen3NextForCausalLM", "Lfm2MoeForCausalLM", "DeepseekV2ForCausalLM"),
    *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
    *("GraniteMoeForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM"),
    *("OlmoeForCausalLM", "Glm4MoeLiteForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("FlexOlmoForCausalLM", "Dots1ForCausalLM", "SolarOpenForCausalLM", "ExaoneMoeForCausalLM"),
    *("MiniMaxM2ForCausalLM", "Ernie4_5_MoeForCausalLM", "HunYuanMoEV1ForCausalLM"),
    *("Qwen3VLMoeForConditionalGeneration", "DeepseekForCausalLM", "BailingMoeForCausalLM"),
    *("AfmoeForCausalLM", "MiMoV2FlashForCausalLM", "LongcatFlashForCausalLM"),
    *("PhimoeForCausalLM", "DbrxForCausalLM", "KimiLinearForCausalLM", "MiniMaxForCausalLM"),
    *("Mistral4ForCausalLM", "MistralLarge3ForCausalLM", "Step3p5ForCausalLM", "ArcticForCausalLM"),
)
_NORMS = {
    **dict.fromkeys(("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Exaone4ForCausalLM"), "head"),
    **{"Gemma3ForCausalLM": "head", "Olmo2ForCausalLM": "all", "Olmo3ForCausalLM": "all"},
    **dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), "head"),
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"), "head"),
    "Qwen3_5MoeForCausalLM": "head",
    "Llama4ForCausalLM": "unit",
    **dict.fromkeys(("OlmoeForCausalLM", "FlexOlmoForCausalLM", "MiniMaxM2ForCausalLM"), "all"),
    **dict.fromkeys(("ApertusForCausalLM", "Dots1ForCausalLM", "ExaoneMoeForCausalLM"), "head"),
    **dict.fromkeys(("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"), "head"),
    "Qwen3VLMoeForConditionalGeneration": "head",
    **{"PersimmonForCausalLM": "layer", "Plamo3ForCausalLM": "head", "Plamo2ForCausalLM": "each"},
    **dict.fromkeys(("AfmoeForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM"), "head"),
    "Step3p5ForCausalLM": "head",
}


_SCANS = {f"{it}ForCausalLM" for it in ("Mamba2", "FalconMamba", "Jamba", "FalconH1", "NemotronH")}
_SCANS |= {"Zamba2ForCausalLM"}
"""Families whose layers mostly keep states of scans (`test_scan_layers.py`)."""


@pytest.mark.parametrize(
    "name", [it for it in FAMILIES if it.endswith("ForCausalLM") and it not in _SCANS]
)
def test_families(name: str) -> None:
    dense = {"num_local_experts": 0, "shared_intermediate_size": 96}
    own: dict[str, dict[str, Any]] = {
        "GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * 3, **dense},
        **{"GPTJForCausalLM": {"rotary_dim": 8}, "MiMoV2FlashForCausalLM": {"v_head_dim": 16}},
        "DeciLMForCausalLM": {"num_key_value_heads_per_layer": [2, 1, 2]},
        "SolarForCausalLM": {f"bskcn_{it}": [min(it, 2)] for it in range(1, 5)},
        "Step3p5ForCausalLM": {"moe_layers_enum": "1,2"},
        "ArcticForCausalLM": {"parallel_attn_mlp_res": True},
    }
    config = parse(architectures=[name], **own.get(name, {}))
    attention = config.layers[0].attention
    behind = (*_BIASED, "TeleChat2ForCausalLM")
    biases = (name in (*_BIASED_QKV, *_BIASED), name in behind)
    assert (attention.qkv_bias, attention.output_bias) == biases
    assert attention.qk_norm == _NORMS.get(name)
    assert (config.experts is not None) is (name in _SPARSE)
    only_behind = (
        *("Exaone4ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "FlexOlmoForCausalLM"),
    )
    behind = (
        *only_behind,
        *("Glm4ForCausalLM", "AfmoeForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        *("Gemma3nForCausalLM", "Gemma4ForCausalLM"),
        *("OuroForCausalLM", "Plamo2ForCausalLM", "Plamo3ForCausalLM"),
    )
    assert config.layers[0].post_norm is (name in behind)
    assert config.layers[0].pre_norm is (name not in only_behind)
    assert config.layers[0].parallel is name.startswith(_PARALLEL)
    assert config.norm.kind == ("layer" if name in _LAYER_NORMS else "rms")


def test_baichuan_scores_by_distance_where_files_are_silent_on_positions() -> None:
    small = {"architectures": ["BaichuanForCausalLM"], "head_dim": ..., "num_key_value_heads": ...}
    assert not parse(**small).layers[0].attention.alibi
    second = parse(**small, max_position_embeddings=..., model_max_length=4096, vocab_size=125_696)
    assert second.layers[0].attention.alibi
    assert second.head.unit == "rows"
    assert second.max_position_embeddings == 4096


def test_parts_of_heads_and_layers_that_are_not_rotated() -> None:
    glm = parse(architectures=["GlmForCausalLM"])
    assert glm.rotary == {"default": RotarySpec(16, 10_000.0)}
    assert glm.attention_linears(0).q.head_order == (
        *range(0, 16, 2),
        *range(1, 16, 2),
        *range(16, 32),
    )
    smol = parse(architectures=["SmolLM3ForCausalLM"], num_hidden_layers=4)
    assert [layer.attention.rotary for layer in smol.layers] == [*["default"] * 3, "none"]
    assert smol.attention_linears(3).q.head_order is None


def test_biases_that_are_switched_on() -> None:
    llama = parse(architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True)
    attention = llama.layers[0].attention
    assert (attention.qkv_bias, attention.output_bias) == (True, True)
    assert llama.layers[0].mlp == MlpSpec(96, bias=True)


def test_absent_head_dim_and_kv_heads() -> None:
    config = parse(architectures=["LlamaForCausalLM"], head_dim=..., num_key_value_heads=...)
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    assert parse(head_dim=...).head_dim == 128  # a Qwen3 head, as in transformers


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert parse(num_hidden_layers=2.0, vocab_size=64.0) == parse(
        num_hidden_layers=2, vocab_size=64
    )
    with pytest.raises(ConfigError, match="num_hidden_layers must be a positive integer"):
        parse(num_hidden_layers=2.5)


def test_rope_scaling_spelled_in_several_ways() -> None:
    scaling = {name: value for name, value in _LLAMA3.items() if name != "rope_type"}
    for changes in (
        {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}, "rope_parameters": {}},
        {
            "rope_theta": 5e5,
            "rope_parameters": _LLAMA3 | {"rope_theta": 5e5},
            "rope_scaling": scaling | {"type": "llama3"},
        },
        {"rope_theta": 5e5, "rope_scaling": scaling | {"rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}},
        {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}},
    ):
        config = parse(**changes)
        assert config.rotary == {"default": RotarySpec(32, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 64))}
        assert config.max_position_embeddings == 512


def test_scalings_that_lengthen_the_context() -> None:
    linear = parse(rope_scaling={"type": "linear", "factor": 2})
    assert linear.rotary["default"].scaling == LinearScaling(2.0)
    assert linear.max_position_embeddings == 1024
    yarn = parse(
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    )
    assert isinstance(yarn.rotary["default"].scaling, YarnScaling)
    assert yarn.max_position_embeddings == 1024


def test_sliding_windows() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert windows(parse(**mistral, sliding_window=100)) == [100] * 3
    assert windows(parse(**mistral, sliding_window=None)) == [None] * 3
    assert windows(parse(**mistral)) == [4096] * 3
    assert windows(parse(sliding_window=100)) == [None] * 3
    used = {"use_sliding_window": True, "sliding_window": 100}
    assert windows(parse(**used, max_window_layers=1)) == [None, 100, 100]
    assert windows(parse(**used, max_window_layers=0)) == [100, 100, 100]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(parse(**used, layer_types=kinds)) == [100, None, 100]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": ...}, " lacks vocab_size, a positive integer."),
        ({"vocab_size": True}, ": vocab_size must be a positive integer, got True."),
        ({"vocab_size": "x"}, ": vocab_size must be a positive integer, got 'x'."),
        ({"hidden_size": -4}, ": hidden_size must be a positive integer, got -4."),
        ({"head_dim": 31}, ": head_dim must be even, got 31."),
        (
            {"num_key_value_heads": 3},
            ": num_key_value_heads must divide num_attention_heads (4), got 3.",
        ),
        ({"rms_norm_eps": 0}, ": rms_norm_eps must be a positive number, got 0."),
        ({"tie_word_embeddings": "yes"}, ": tie_word_embeddings must be true or false, got 'yes'."),
        ({"hidden_act": "gelu"}, ": hidden_act must be 'silu', got 'gelu'."),
        (
            {"torch_dtype": "float64"},
            ": torch_dtype must be one of float32, bfloat16, float16, got 'float64'.",
        ),
        (
            {"rope_scaling": {"type": "x", "factor": 2.0}},
            ": rope_scaling.type must be one of default, dynamic, linear, ntk, llama3, yarn, deepseek_yarn, "
            "longrope, proportional, got 'x'.",
        ),
        ({"rope_scaling": {"type": "linear"}}, " lacks rope_scaling.factor, a positive number."),
        ({"rope_scaling": 3}, ": rope_scaling must be a JSON object, got 3."),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            ": no_rope_layers must be a list of 3 numbers, each 0 or 1, got [1].",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [2, 2, -1]},
            ": no_rope_layers must be a list of 3 numbers, each 0 or 1, got [2, 2, -1].",
        ),
        (
            {"architectures": ["GraniteForCausalLM"], "position_embedding_type": "alibi"},
            ": position_embedding_type must be 'rope' or 'nope', got 'alibi'.",
        ),
        (
            {"rope_scaling": {**_LONGROPE, "original_max_position_embeddings": 1}},
            ": rope_scaling.original_max_position_embeddings must be at least 2, got 1.",
        ),
        (
            {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}},
            ": rope_theta must be above 1 where frequencies are scaled by YaRN, got 1.",
        ),
        (
            {"rope_scaling": _LLAMA3 | {"high_freq_factor": 0.5}},
            ": rope_scaling.high_freq_factor must be at least low_freq_factor (1.0), got 0.5.",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 1e308}},
            ": max_position_embeddings and the factor of its scaling must leave at most 2147483647, "
            "got 512.",
        ),
        ({"rope_theta": 10**400}, f": rope_theta must be a positive number, got {10**79} ...."),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_type": "linear", "factor": 4},
            },
            ": rope_scaling must say what rope_parameters says, or be absent, "
            "got {'type': 'linear', 'factor': 2}.",
        ),
        (
            {"architectures": ["GlmForCausalLM"], "partial_rotary_factor": 1.5},
            ": partial_rotary_factor must leave an even part of the 32 of a head, got 1.5.",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            ": rope_parameters.partial_rotary_factor is not supported; it must be absent or 1, "
            "got 0.5.",
        ),
        (
            {"hidden_activation": "gelu_pytorch_tanh"},
            ": hidden_activation must be 'silu', got 'gelu_pytorch_tanh'.",
        ),
        (
            {"attention_multiplier": 0.015625},
            ": attention_multiplier is not supported; it must be absent or 1, got 0.015625.",
        ),
        (
            MOE | {"decoder_sparse_step": 0},
            ": decoder_sparse_step must be a positive integer, got 0.",
        ),
        (
            MOE | {"moe_intermediate_size": "wide"},
            ": moe_intermediate_size must be a positive integer, got 'wide'.",
        ),
        (
            {"partial_rotary_factor": 0.5},
            ": partial_rotary_factor is not supported; it must be absent or 1, got 0.5.",
        ),
        (
            {
                "architectures": ["Lfm2ForCausalLM"],
                "layer_types": ["conv", "full_attention", "conv"],
                "is_causal": False,
            },
            ": is_causal must be true of a model whose layers keep states or latents, got False.",
        ),
        ({"mlp_bias": True}, ": mlp_bias is not supported; it must be absent or false, got True."),
        (
            {"architectures": ["GPT9LMHeadModel"]},
            ": architecture 'GPT9LMHeadModel' is not supported; the nearest that are supported are "
            "GPT2LMHeadModel, QWenLMHeadModel and JAISLMHeadModel.",
        ),
        (
            {"architectures": ...},
            ' names no architectures; it must have a list such as ["LlamaForCausalLM"].',
        ),
        ({"quantization_config": [4]}, ": quantization_config must be a JSON object, got [4]."),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            ": layer_types must be a list of 3 of full_attention, sliding_attention, "
            "got ['full_attention'].",
        ),
        (
            MIXTRAL | {"num_experts_per_tok": 9},
            ": num_experts_per_tok must be at most num_local_experts (8), got 9.",
        ),
        (
            MOE | {"num_experts": 4},
            ": num_experts_per_tok must be at most num_experts (4), got None.",
        ),
        (
            MOE | {"mlp_only_layers": [3]},
            ": mlp_only_layers must be a list of layers from 0 to 2, got [3].",
        ),
    ],
)
def test_wrong_values_are_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert str(caught.value) == f"config.json{message}"


def test_text_parts_are_read_by_their_kind() -> None:
    text = {name: value for name, value in BASE.items() if name != "architectures"}
    outer = {"architectures": ["SomeForConditionalGeneration"], "dtype": "bfloat16"}

    def nested(**changes: Any) -> ModelSpec:
        return parse_model_config(outer | {"text_config": text | changes}, source="config.json")

    assert nested(model_type="qwen3", dtype=None) == parse(dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"text_config\.head_dim must be even, got 31\."):
        nested(model_type="qwen3", head_dim=31)
    with pytest.raises(
        ConfigError,
        match=r"text_config\.model_type is none .* are .*\bllama4_text\b.*, got 'mllama",
    ):
        nested(model_type="mllama_text_model")


@pytest.mark.parametrize("layers", [[-1], [2], [0, 5]])
def test_layers_with_experts_are_layers_of_the_model(layers: list[Any]) -> None:
    values = BASE | {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="moe_layers must be a list of"):
        parse_model_config(values | {"moe_layers": layers}, source="config.json")


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("mistral", "MistralForCausalLM", {"sliding_window": None}),
        ("ministral", "MinistralForCausalLM", {"sliding_window": None}),
        ("llama4_text", "Llama4ForCausalLM", {"attention_chunk_size": None}),
        ("gemma3_text", "Gemma3ForCausalLM", {"sliding_window": None}),
        ("ministral3", "Ministral3ForCausalLM", {"rope_parameters": None, "head_dim": None}),
    ],
)
def test_an_explicit_null_in_a_text_part_means_what_it_means_alone(
    kind: str, name: str, changes: dict[str, Any]
) -> None:
    values = BASE | changes
    nested = {"text_config": values | {"model_type": kind}}
    assert parse_model_config(nested, source="config.json") == parse(
        architectures=[name], **changes
    )


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True)])
def test_tensors_tell_whether_a_head_is_tied_where_flags_differ(
    outer: bool, inner: bool, tmp_path: Path
) -> None:
    """As transformers 5 writes Mistral Small 3.1."""
    text = BASE | {"model_type": "mistral", "tie_word_embeddings": inner}
    values = {"tie_word_embeddings": outer, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_model_config(tmp_path).tie_word_embeddings is outer  # without files
    path, embedding = tmp_path / "model.safetensors", torch.zeros(1)
    save_file({"language_model.model.embed_tokens.weight": embedding}, path)
    assert read_model_config(tmp_path).tie_word_embeddings
    save_file({"language_model.lm_head.weight": embedding}, path)
    assert not read_model_config(tmp_path).tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Qwen3AudioMoeForCausalLM", "Qwen3MoeForCausalLM"),
        ("Gemma3sForConditionalGeneration", "Gemma3ForCausalLM"),
        ("DeepseekV9ForCausalLM", "DeepseekV3ForCausalLM"),
    ],
)
def test_the_three_nearest_architectures_are_named(name: str, nearest: str) -> None:
    known = r"\w+"
    with pytest.raises(
        ConfigError, match=f"{name}' is .* are {known}, {known} and {known}\\.$"
    ) as caught:
        parse(architectures=[name])
    assert nearest in str(caught.value)


def test_architectures_that_are_refused_say_why() -> None:
    for name, refusal in REFUSED.items():
        assert name not in FAMILIES
        assert refusal.nearest in FAMILIES
        with pytest.raises(ConfigError) as caught:
            parse(architectures=[name], index_topk=2048)
        assert str(caught.value) == (
            f"config.json: {name} {refusal.reason}, which Pagoda does not compute; the nearest that it serves is "
            f"{refusal.nearest}."
        )


def test_scores_of_experts_are_those_that_the_family_computes() -> None:
    glm = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8}
    assert parse(**glm, scoring_func="sigmoid") == parse(**glm)
    with pytest.raises(ConfigError, match=r'scoring_func is not supported; it must be .*"sigmoid"'):
        parse(**glm, scoring_func="softmax")
    with pytest.raises(ConfigError, match=r'scoring_func is not supported; it must be .*"softmax"'):
        parse(scoring_func="sigmoid")


def test_switches_that_leave_the_arithmetic_alone_are_accepted() -> None:
    neutral = {
        "partial_rotary_factor": 1.0,
        "hidden_activation": "silu",
        "final_logit_softcapping": None,
    }
    assert parse(**neutral, use_mrope=False, mlp_bias=False) == parse()
    assert parse(use_qk_norm=True, is_causal=True) == parse()
    assert parse(**MOE, use_qk_norm=True, qkv_bias=False) == parse(**MOE)  # Qwen3-Coder
    llama = {"architectures": ["Llama4ForCausalLM"]}
    assert parse(**llama, attn_temperature_tuning=4) == parse(**llama)
    assert parse(**llama, attn_temperature_tuning=0) == parse(
        **llama, attn_temperature_tuning=False
    )


def test_layers_with_experts() -> None:
    def layers(**changes: Any) -> list[int]:
        config = parse(**MOE, num_hidden_layers=6, **changes)
        return [layer for layer in range(6) if config.expert_linears(layer) is not None]

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(decoder_sparse_step=2) == [1, 3, 5]
    assert layers(decoder_sparse_step=2, mlp_only_layers=[0, 3]) == [1, 5]
    assert layers(mlp_only_layers=[]) == [0, 1, 2, 3, 4, 5]
    assert layers(num_experts=0) == []


def test_experts_and_their_names() -> None:
    qwen = parse(**MOE, num_experts=4, num_experts_per_tok=2)
    assert qwen.experts.intermediate_size == 768
    assert not qwen.experts.routing.renormalize
    new = parse(**MOE, num_local_experts=4, num_experts_per_tok=2)
    assert new == qwen
    maps = qwen.expert_linears(1)
    assert (maps.router.name, maps.router.outputs) == ("model.layers.1.mlp.gate", 4)
    assert [m.name for m in maps.experts[3]] == [
        f"model.layers.1.mlp.experts.3.{name}_proj" for name in ("gate", "up", "down")
    ]
    assert qwen.weights_per_token(1) == 2 * 64 * 768 * 3 + 4 * 64 + 64 * 32 * (4 + 2 + 2 + 4)
    mixtral = parse(**MIXTRAL, sliding_window=16)
    assert mixtral.experts.routing.renormalize
    assert (mixtral.experts.routing.num_experts, mixtral.experts.routing.experts_per_token) == (
        8,
        2,
    )
    assert windows(mixtral) == [16, 16, 16]
    assert windows(parse(**MIXTRAL)) == [None, None, None]
    maps = mixtral.expert_linears(0)
    assert maps.router.name == "model.layers.0.block_sparse_moe.gate"
    assert [m.name for m in maps.experts[7]] == [
        f"model.layers.0.block_sparse_moe.experts.7.{name}" for name in ("w1", "w3", "w2")
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config.json is missing; give a Hugging Face model"):
        read_model_config(tmp_path)
    for content in (b"{", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config.json is not valid JSON"):
            read_model_config(tmp_path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"config.json must hold a JSON object"):
        read_model_config(tmp_path)
    path.write_text(json.dumps(BASE))
    assert read_model_config(tmp_path) == parse()


def test_presets_have_the_size_that_is_published() -> None:
    millions = {
        "qwen3-0.6b": 596,
        "qwen3-4b": 4022,
        "qwen3-14b": 14768,
        "llama-3.2-1b": 1236,
        "llama-3.1-8b": 8030,
        "qwen3-30b-a3b": 30532,
        "mixtral-8x7b": 46703,
    }
    for preset, size in millions.items():
        config = parse_model_config(PRESETS[preset], source=preset)
        assert round(whole(config).weight_bytes(None, 4) / 4e6) == pytest.approx(size, abs=1)


def test_a_decoder_alone_has_its_embedding_table_as_head() -> None:
    config = parse(architectures=["Qwen3Model"], tie_word_embeddings=False)
    assert (config.family.architecture, config.tie_word_embeddings) == ("Qwen3ForCausalLM", True)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str) -> None:
    config = parse(architectures=[name], hidden_act="gelu", num_labels=1, pad_token_id=3)
    layer, encoder = config.layers[0], config.encoder
    assert encoder is not None
    assert (layer.attention.causal, layer.attention.qkv_bias, layer.norms_sums) == (
        False,
        True,
        True,
    )
    assert encoder.first_position == (4 if "Roberta" in name else 0)
    assert config.max_position_embeddings == encoder.num_positions - encoder.first_position
    assert (config.classifier is not None) is name.endswith("ForSequenceClassification")
    assert not config.gives_logits


def test_an_encoder_as_its_makers_publish_it() -> None:
    """Nomic's own names of sizes, and the texts of its training as the longest ones."""
    published = {
        **{"architectures": ["NomicBertModel"], "vocab_size": 30528, "n_embd": 768, "n_head": 12},
        **{"n_inner": 3072, "n_layer": 12, "n_positions": 8192, "max_trained_positions": 2048},
        **{"activation_function": "swiglu", "layer_norm_epsilon": 1e-12, "prenorm": False},
        **{"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_scaling_factor": None},
        **{"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "causal": False},
        **{"type_vocab_size": 2, "num_experts": 0},
    }
    spec = parse_model_config(published, source="config.json")
    mlp = spec.layers[0].mlp
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.head_dim) == (768, 12, 12, 64)
    assert (mlp.intermediate_size, mlp.activation, mlp.gated, mlp.bias) == (
        3072,
        "silu",
        True,
        False,
    )
    assert spec.rotary["default"] == RotarySpec(64, 1000.0)
    assert (spec.max_position_embeddings, spec.norm.eps) == (2048, 1e-12)
    plain = published | {"activation_function": "gelu", "mlp_fc1_bias": True, "mlp_fc2_bias": True}
    other = parse_model_config(plain, source="config.json")
    assert (other.layers[0].mlp.gated, other.mlp_linears(0).into[0].name) == (
        False,
        "encoder.layers.0.mlp.fc1",
    )
