# SPDX-License-Identifier: Apache-2.0
"""Layers of families whose files say of each what it is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.layer_runs import layer_runs
from pagoda.checkpoints.rope import RotarySpec
from pagoda.errors import ConfigError

_BASE: dict[str, Any] = {
    **{"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "max_position_embeddings": 512},
}
_SLIDING = ["sliding_attention"]


def parse(**changes: Any) -> Any:
    return parse_model_config(_BASE | changes, source="config.json")


def test_layers_that_were_searched_for() -> None:
    """DeciLM has lists of heads of keys, or blocks of which each may lack attention or an MLP."""
    deci = {"architectures": ["DeciLMForCausalLM"]}
    listed = parse(**deci, num_key_value_heads_per_layer=[2, 1, 2])
    plain = {"intermediate_size": 96}
    blocks = [{"attention": {"n_heads_in_group": it}, "ffn": plain} for it in (2, 4, 2)]
    assert parse(**deci, block_configs=blocks) == listed
    assert [layer.attention.own_heads is None for layer in listed.layers] == [True, False, True]
    of_fewer = listed.attention_linears(1)
    assert [it.fill is not None for it in of_fewer] == [False, True, True, False]
    assert of_fewer[::3] == tuple(
        replace(it, name=it.name.replace(".0.", ".1.")) for it in listed.attention_linears(0)[::3]
    ), "as in a layer of as many heads as any: a file's formats of 4 and 8 bits stay"
    nothing = {"attention": {"no_op": True}, "ffn": {"ffn_mult": 3.0}}
    attention_alone = {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}}
    config = parse(**deci, block_configs=[nothing, attention_alone, nothing])
    assert config.kept_layers == [None, ("full", 0), None]
    assert [layer.mlp and layer.mlp.intermediate_size for layer in config.layers] == [
        256,
        None,
        256,
    ]
    assert layer_runs(config) == [range(3)]
    window = {"attention": {"n_heads_in_group": 2, "window_length": 512}, "ffn": plain}
    for blocks, said in (
        ([nothing] * 3, "must have 3 layers, whose heads of keys divide the most of one"),
        ([attention_alone], "must have 3 layers"),
        ([{"ffn": plain}] * 3, "must be a list of objects that each have an object attention"),
        ([window] * 3, r"block_configs\[0\].attention.window_length is not supported"),
        ([{**nothing, "ffn": {**plain, "gated": False}}] * 3, "ffn.gated is not supported"),
        (
            [{"attention": {"n_heads_in_group": 2, "unshifted_sink": True}, "ffn": plain}] * 3,
            "unshifted_sink is not",
        ),
        ([{**nothing, "ffn": {"replace_with_linear": True}}] * 3, "replace_with_linear is not"),
        ([{**nothing, "ffn": {"ffn_mult": 1e308}}] * 3, r"\[0\].ffn.ffn_mult must be at most 1024"),
        ([{**nothing, "ffn": {"ffn_mult": 1e-9}}] * 3, "ffn_mult must .* leave an inner channel"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(**deci, block_configs=blocks)


def test_layers_that_are_mixed_with_others_stay_on_one_stage() -> None:
    solar = {
        "architectures": ["SolarForCausalLM"],
        "num_hidden_layers": 6,
        "bskcn_2": [],
        "bskcn_4": [],
    }
    config = parse(**solar, bskcn_1=[1, 3], bskcn_3=[2, 4])
    assert [layer.mixed_with for layer in config.layers[2:5]] == [((1, 0.8),), (), ((3, 0.8),)]
    assert layer_runs(config) == [range(1), range(1, 3), range(3, 5), range(5, 6)]
    with pytest.raises(ConfigError, match="bskcn_3 must name layers behind one of bskcn_1"):
        parse(**solar, bskcn_1=[3], bskcn_3=[2])


def test_rotary_bases_layer_by_layer() -> None:
    """Step 3.5 has lists, which count layers that predict several tokens at once."""
    step = {
        **{"architectures": ["Step3p5ForCausalLM"], "num_attention_groups": 2, "head_dim": 32},
        "layer_types": ["full_attention", *_SLIDING * 3],
    }
    parts = {"partial_rotary_factors": [0.5, 1.0, 1.0, 1.0], "moe_layers_enum": "1,2"}
    config = parse(**step, **parts, rope_theta=[5e6, 1e4, 1e4, 1e4])
    assert config.rotary["default"] == RotarySpec(16, 5e6)
    assert config.rotary["local"] == RotarySpec(32, 1e4)
    for thetas, said in (
        ([5e6, 1e4, 2e4, 1e4], "must be the same"),
        ([5e6, 1e4], "must be a list of 3"),
    ):
        with pytest.raises(ConfigError, match=f"rope_theta {said}"):
            parse(**step, **parts, rope_theta=thetas)
    one = parse(**step, **{**parts, "moe_layers_enum": [1, 2]}, rope_theta=1e4)
    assert one.rotary == {"default": RotarySpec(16, 1e4), "local": RotarySpec(32, 1e4)}
    other = "attention_other_setting"
    for own, said in (
        ({"swiglu_limits": [0, 0.5, 0]}, "swiglu_limits must be a list of 3 numbers"),
        ({"swiglu_limits": [0, math.nan, 0]}, "swiglu_limits must be a list of 3 numbers"),
        ({"partial_rotary_factors": [0.5, 1.0]}, "partial_rotary_factors must be a list of 3"),
        ({other: {"num_attention_groups": 4}}, f"{other}.num_attention_groups is not supported"),
        ({other: {"head_dim": 64}}, f"{other}.head_dim is not supported"),
        ({other: {"attention_type": "full_attention"}}, f"{other}.attention_type is not"),
        ({"sink": True}, "sink is not supported"),
        *(
            ({"moe_layers_enum": it}, "moe_layers_enum must list layers from 0 to 2")
            for it in ("1,x", "99", "-1", [3], 1)
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(**step, **{**parts, "rope_theta": 1e4, **own})


def test_experts_beside_the_mlp_of_what_attention_gives() -> None:
    """The makers' code of Arctic has them one behind the other where its file is silent."""
    with pytest.raises(ConfigError, match="parallel_attn_mlp_res must be true, got None"):
        parse(architectures=["ArcticForCausalLM"])


def test_a_base_that_is_no_number_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1e308}
    with pytest.raises(ConfigError, match=r"alpha must be at most 1000000"):
        parse(architectures=["HunYuanDenseV1ForCausalLM"], head_dim=16, rope_parameters=rope)
