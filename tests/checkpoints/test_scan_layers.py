# SPDX-License-Identifier: Apache-2.0
"""Models with Mamba layers: what their files say, and how they are shared out."""

from __future__ import annotations

from typing import Any

import pytest

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.scan_layers import MOST, Mamba2Spec
from pagoda.checkpoints.topology import check_shares
from pagoda.errors import ConfigError
from pagoda.model.sharding import Shard, split_layers
from pagoda.parallel.config import ParallelConfig


def _model(architecture: str, **fields: Any) -> ModelSpec:
    shape: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "mamba_n_heads": 8,
        "max_position_embeddings": 64,
    }
    return parse_model_config({**shape, **fields}, source="config.json")


def _hybrid(pattern: str, **fields: Any) -> ModelSpec:
    sizes = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_routed_experts": 4}
    return _model(
        "NemotronHForCausalLM", hybrid_override_pattern=pattern, head_dim=8, **sizes, **fields
    )


def test_an_mlp_has_the_number_behind_that_of_its_mixer() -> None:
    spec = _hybrid("M-M*EM")
    assert [layer.mlp is None for layer in spec.layers] == [False, True, False, True]
    assert spec.mlp_linears(0).down.name == "backbone.layers.1.mixer.down_proj"
    experts = spec.expert_linears(2, [3])
    assert experts is not None
    assert experts.experts[0].down.name == "backbone.layers.4.mixer.experts.3.down_proj"
    assert spec.attention_linears(3).out.name == "backbone.layers.5.mixer.out_proj"


@pytest.mark.parametrize(
    ("pattern", "fields", "message"),
    [
        ("-M", {}, "mamba or attention layer in front of each mlp"),
        ("ME-", {}, "mamba or attention layer in front of each mlp"),
        ("MX", {}, "must name mamba"),
        ("ME", {"moe_latent_size": 0}, "moe_latent_size must be a positive integer"),
    ],
)
def test_patterns_that_are_refused(pattern: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _hybrid(pattern, **fields)


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (None, (0.0, MOST)),
        ([0.001, {"__float__": "Infinity"}], (0.001, MOST)),
        ([0.0, float("inf")], (0.0, MOST)),
        ([0.5, 2], (0.5, 2.0)),
    ],
)
def test_limits_of_steps(given: list[object] | None, limit: tuple[float, float]) -> None:
    state = _model("BambaForCausalLM", time_step_limit=given).layers[0].state
    assert isinstance(state, Mamba2Spec)
    assert state.dt_limit == limit


@pytest.mark.parametrize("given", ["all", [1.0], [0.0, "much"], [-1.0, 1.0]])
def test_limits_of_steps_that_are_none(given: object) -> None:
    with pytest.raises(ConfigError, match="time_step_limit must be a list of two numbers"):
        _model("BambaForCausalLM", time_step_limit=given)


def test_ranks_share_groups_as_they_share_kv_heads() -> None:
    spec = _model("BambaForCausalLM", mamba_n_groups=2, mamba_d_state=4)
    for size, groups in ((1, [[0, 1]]), (2, [[0], [1]])):
        check_shares("the model", spec, ParallelConfig(tensor_parallel_size=size))
        shards = [Shard(spec, range(4), rank, size) for rank in range(size)]
        _, of_b, _ = spec.attention_linears(0).into
        held = [shard.part_of(of_b).outputs for shard in shards]
        assert held == [range(4 * own[0], 4 * own[-1] + 4) for own in groups]
    message = "8 cannot share out Mamba-2 of 8 heads of 4 by 16 of m; the nearest that can is 2."
    with pytest.raises(ConfigError, match=message):
        check_shares("m", spec, ParallelConfig(tensor_parallel_size=8))


def test_ranks_hold_the_one_group_that_there_is() -> None:
    spec = _model("BambaForCausalLM", mamba_d_state=4)
    shard = Shard(spec, range(4), 3, 8)
    x, b, c = (shard.part_of(it).outputs for it in spec.attention_linears(0).into)
    assert (x, b, c) == (range(48, 64), range(4), range(4))
    conv, heads = shard.state_units(0)
    assert conv == [range(48, 64), range(128, 132), range(132, 136)]
    assert heads == [range(3, 4)]


def test_mixers_of_one_input_are_of_one_stage() -> None:
    spec = _model("FalconH1ForCausalLM", mamba_d_ssm=64, num_hidden_layers=3)
    assert [layer.same_input for layer in spec.layers] == [False, True] * 3
    stages = split_layers(spec, 2)
    assert [stage.start % 2 for stage in stages] == [0, 0]
    assert [*stages[0], *stages[1]] == [*range(6)]
    check_shares("m", spec, ParallelConfig(pipeline_parallel_size=3))
    with pytest.raises(ConfigError, match="4 is more than the 3 layers of m"):
        check_shares("m", spec, ParallelConfig(pipeline_parallel_size=4))
