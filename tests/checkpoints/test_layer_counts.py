# SPDX-License-Identifier: Apache-2.0
"""Numbers in config.json that no model has."""

from __future__ import annotations

import pytest

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.families import FAMILIES
from pagoda.errors import ConfigError

_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 64}


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_a_number_of_layers_that_no_model_has_is_refused_before_they_are_counted(
    architecture: str,
) -> None:
    family = FAMILIES[architecture]
    names = {own for own, usual in family.renamed.items() if usual == "num_hidden_layers"}
    counts = dict.fromkeys({"num_hidden_layers", *names}, 2**31 - 1)
    with pytest.raises(ConfigError, match=r"num_hidden_layers must be .* 4096"):
        parse_model_config({"architectures": [architecture], **_SIZES, **counts}, source="c.json")


@pytest.mark.parametrize("number", ["NaN", "-Infinity"])
def test_a_number_that_is_none_is_refused_by_its_name(number: str) -> None:
    values = {
        **_SIZES,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "num_key_value_heads": 2,
        "router_jitter_noise": float(number),
    }
    with pytest.raises(ConfigError, match="router_jitter_noise must be a finite number"):
        parse_model_config({"architectures": ["PhimoeForCausalLM"], **values}, source="c.json")
