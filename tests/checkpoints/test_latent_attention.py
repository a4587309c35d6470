# SPDX-License-Identifier: Apache-2.0
"""Models with latent attention: sizes, scales and experts by config.json, and what they keep of a token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.latent_attention import LatentSpec
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.linears import LinearRole
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.rope import TemperatureSpec, YarnScaling
from pagoda.cli.model_report import model_facts
from pagoda.errors import ConfigError
from pagoda.messages.kv_groups import KVKind
from pagoda.model.sharding import Shard, whole

_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "ep_size": 1,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "seq_aux": True,
    "rope_theta": 10000,
    "rope_scaling": _YARN,
    "max_position_embeddings": 163_840,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
"""config.json of DeepSeek-V2-Lite."""
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "ep_size": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "rope_theta": 10000,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 163_840,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "torch_dtype": "bfloat16",
}
"""config.json of DeepSeek-V3."""
_NOT_LLAMA = dict.fromkeys(
    (
        *("n_routed_experts", "n_shared_experts", "kv_lora_rank", "q_lora_rank"),
        *("n_group", "topk_group", "topk_method", "scoring_func", "routed_scaling_factor"),
        "first_k_dense_replace",
    )
)


def parse(values: dict[str, Any], **changes: Any) -> ModelSpec:
    return parse_model_config({**values, **changes}, source="config.json")


def test_published_models() -> None:
    lite, large = parse(V2_LITE), parse(V3)
    assert lite.latent == LatentSpec(512, 64, 128, 128, None)
    assert large.latent == LatentSpec(512, 64, 128, 128, 1536)
    assert (lite.head_dim, lite.rotary["default"].dim) == (192, 64)
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in large.layers] == 3 * [False] + 58 * [
        True
    ]
    assert lite.experts == ExpertsSpec(
        ExpertRouting(64, 6, renormalize=False), 1408, shared_size=2816
    )
    routing = ExpertRouting(
        256,
        8,
        renormalize=True,
        scores="sigmoid",
        num_groups=8,
        groups_per_token=4,
        group_score="best_two",
        scaling_factor=2.5,
    )
    assert large.experts == ExpertsSpec(routing, 2048, correction=True, shared_size=2048)
    # 15.7 and 671 billion weights, as their makers count them.
    assert round(whole(lite).weight_bytes(None, 2) / 2e8) == 157
    assert round(whole(large).weight_bytes(large.quantization, 2) / 2e9) == 671


def test_scores_are_scaled_where_yarn_scales_all_dimensions() -> None:
    lite = parse(V2_LITE).layers[0].attention
    assert lite.scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    plain = parse(V2_LITE, rope_scaling={**_YARN, "mscale_all_dim": None}).layers[0].attention
    with pytest.raises(ConfigError, match="mscale_all_dim must be at most 1024"):
        parse(V2_LITE, rope_scaling={**_YARN, "mscale_all_dim": 1e308})
    assert plain.scale == parse(V2_LITE, rope_scaling=None).layers[0].attention.scale == 192**-0.5
    off = parse(V2_LITE, rope_scaling={**_YARN, "apply_yarn_scaling": False})
    assert off.layers[0].attention.scale == 192**-0.5


def test_yarn_that_scales_nothing_but_frequencies() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "mscale": 2.0}
    deepseek = (
        parse(V2_LITE, rope_scaling={**rope, "type": "deepseek_yarn"}).rotary["default"].scaling
    )
    assert isinstance(deepseek, YarnScaling)
    assert (deepseek.mscale, deepseek.mscale_all_dim) == (2.0, 0.0)
    plain = {**rope, "apply_yarn_scaling": False}
    scaling = parse(V2_LITE, rope_scaling=plain).rotary["default"].scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.attention_factor, scaling.mscale, scaling.mscale_all_dim) == (1.0, None, None)
    with pytest.raises(ConfigError, match=r"rope_scaling\.attention_factor is not supported"):
        parse(V2_LITE, rope_scaling={**plain, "attention_factor": 2.0})


def test_queries_of_mistral_large_3_are_scaled_by_their_positions() -> None:
    """Its adapted config.json calls its text part `deepseek_v3`."""
    scaling = {"beta": 0.1, "original_max_position_embeddings": 8192}
    text = {**V3, "model_type": "deepseek_v3", "llama_4_scaling": scaling}
    values = {"architectures": ["PixtralForConditionalGeneration"], "text_config": text}
    for layer in parse(values).layers:
        assert layer.attention.temperature == TemperatureSpec(8192.0, 0.1, 0.0)


def test_a_layer_keeps_one_vector_of_a_token() -> None:
    """As table 1 of DeepSeek-V2 has it: 4.5 heads' worth a layer, where K and V of plain heads are 2 a head."""
    large, head_dim = parse(V3), 128
    vectors, numbers = large.kv_vectors
    assert vectors * large.num_kv_heads * numbers == 512 + 64 == 4.5 * head_dim
    plain = parse(V3, architectures=["LlamaForCausalLM"], head_dim=head_dim, **_NOT_LLAMA)
    vectors, numbers = plain.kv_vectors
    assert vectors * plain.num_kv_heads * numbers == 2 * 128 * head_dim
    for tp in (1, 2, 16):  # and so does every rank
        for rank in (0, tp - 1):
            assert Shard(large, range(61), rank, tp).kv_vectors == (1, 576)
    assert {KVKind(layer.kv_kind) for layer in large.layers} == {KVKind.LATENT}
    said = dict(model_facts(large, "auto"))
    assert said["KV cache"] == "68.6 KiB a token in 16 bits, about half in int8"
    assert "128 heads of 192 over a latent vector of 576 numbers a token" in said["layers"]
    assert "61 with latent attention" in said["layers"]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("values", [V2_LITE, V3])
def test_ranks_hold_every_weight_of_attention_once(values: dict[str, Any], tp: int) -> None:
    """Heads are shared out; latent vectors are made on every rank."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = parse(values, **sizes, kv_lora_rank=16, qk_nope_head_dim=8, v_head_dim=4)
    shards = [Shard(config, range(config.num_layers), rank, tp) for rank in range(tp)]
    for linear in filter(None, config.attention_linears(1)):
        held = torch.zeros(linear.outputs, linear.inputs)
        for shard in shards:
            part = shard.part_of(linear)
            held[part.outputs.start : part.outputs.stop, part.inputs.start : part.inputs.stop] += 1
        assert bool((held == (tp if linear.role is LinearRole.LATENT_IN else 1)).all()), linear.name


def test_layers_with_experts_may_take_turns() -> None:
    config = parse(V2_LITE, num_hidden_layers=7, moe_layer_freq=2)
    sparse = [isinstance(layer.mlp, ExpertsSpec) for layer in config.layers]
    assert sparse == [False, False, True, False, True, False, True]


@pytest.mark.parametrize(
    ("values", "changes", "sentence"),
    [
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method must be one of greedy, group_limited"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
        (V2_LITE, {"n_group": 8}, "n_group is not supported; it must be absent or 1"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func is not supported"),
        (V2_LITE, {"attention_bias": True}, "attention_bias is not supported"),
        (V2_LITE, {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer"),
        (V2_LITE, {"moe_layer_freq": 0}, "moe_layer_freq must be a positive integer"),
        (V3, {"topk_method": "greedy"}, 'topk_method is not supported; .*"noaux_tc"'),
        (V3, {"scoring_func": "softmax"}, "scoring_func is not supported"),
        (V3, {"rope_interleave": False}, "rope_interleave is not supported"),
        (V3, {"n_group": 3}, r"n_group must divide n_routed_experts \(256\)"),
        (V3, {"topk_group": 9}, "topk_group must be at most n_group and have 8 experts"),
        (V3, {"index_topk": 2048}, "index_topk is not supported; it must be absent or 0"),
        (
            V3,
            {"architectures": ["DeepseekV32ForCausalLM"], "llama_4_scaling": {"beta": 0.1}},
            "llama_4_scaling is not supported",
        ),
        (V3, {"mlp_bias": True}, "mlp_bias is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(
    values: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(values, **changes)
