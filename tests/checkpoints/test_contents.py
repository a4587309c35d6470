# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.contents import missing_tensor, unread_tensors
from pagoda.checkpoints.model_spec import ModelSpec

HUGE = {"num_hidden_layers": 4096, "num_experts": 65_536}


def mixture(**changed: object) -> ModelSpec:
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        **{"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256},
        **{"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2},
        "max_position_embeddings": 128,
    }
    return parse_model_config(fields | changed, source="config.json")


def test_tensors_that_no_layer_and_no_expert_has_are_told() -> None:
    of_layer = "model.layers.1.mlp"
    read = [f"{of_layer}.experts.7.up_proj.weight", f"{of_layer}.gate.weight", "lm_head.weight"]
    parts = [f"{of_layer}.experts.3.down_proj.{part}" for part in ("qweight", "scales")]
    behind = ["model.layers.3.mlp.experts.0.up_proj.weight"]
    unread = [
        f"{of_layer}.experts.8.up_proj.weight",
        f"{of_layer}.up_proj.weight",
        f"{of_layer}.experts.7.up_proj.bias",
        f"{of_layer}.experts.{'7' * 5000}.up_proj.weight",
    ]
    number = [f"model.layers.{'1' * 5000}.mlp.gate.weight"]
    names = [*read, *parts, *behind, *unread, *number]
    assert list(unread_tensors(mixture(), names)) == unread


def test_few_names_are_looked_at_whatever_numbers_a_config_has() -> None:
    """All tensors of this model would be 800 million."""
    spec = mixture(**HUGE)
    known = [f"model.layers.{i}.mlp.experts.{9 * i}.up_proj.weight" for i in range(0, 4096, 64)]
    unknown = [f"model.layers.{i}.mlp.experts.{9 * i}.up_proj.extra" for i in range(0, 4096, 64)]
    assert list(unread_tensors(spec, [*known, *unknown])) == unknown
    assert missing_tensor(spec, set(known)) is not None
