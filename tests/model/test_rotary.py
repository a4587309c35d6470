# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.model.rotary import rotary_frequencies

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        _YARN,
        _YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        _YARN | {"attention_factor": 0.7},
        _YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    ],
    ids=lambda scaling: "-".join(str(value) for value in scaling.values()),
)
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_scalings_equal_transformers(scaling: dict[str, Any], theta: float) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 8,
        "hidden_size": 256,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    }
    oracle = transformers.LlamaConfig(**shape, rope_parameters=scaling | {"rope_theta": theta})
    expected, expected_scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](oracle, "cpu")
    config = parse_model_config(
        shape
        | {
            "architectures": ["LlamaForCausalLM"],
            "rope_theta": theta,
            "rope_scaling": scaling,
        },
        source="config.json",
    )
    frequencies, scale = rotary_frequencies(config.rotary["default"], 0)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected_scale)


@pytest.mark.parametrize("length", [100, 512, 513, 2048])
def test_dynamic_scaling_is_that_of_transformers_for_the_longest_sequence(length: int) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 8,
        "hidden_size": 96,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    oracle = transformers.LlamaConfig(**shape, rope_parameters=scaling | {"rope_theta": 1e4})
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](oracle, "cpu", seq_len=length)
    values = shape | {"architectures": ["LlamaForCausalLM"], "rope_scaling": scaling}
    config = parse_model_config(values, source="config.json")
    assert config.max_position_embeddings == 2048
    frequencies, scale = rotary_frequencies(config.rotary["default"], length)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert scale == 1
