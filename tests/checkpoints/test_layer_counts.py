# SPDX-License-Identifier: Apache-2.0
"""Numbers of layers in config.json that no model has."""

from __future__ import annotations

import pytest

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.families import FAMILIES
from pagoda.errors import ConfigError


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_a_number_of_layers_that_no_model_has_is_refused_before_they_are_counted(
    architecture: str,
) -> None:
    family = FAMILIES[architecture]
    names = {own for own, usual in family.renamed.items() if usual == "num_hidden_layers"}
    counts = dict.fromkeys({"num_hidden_layers", *names}, 2**31 - 1)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 64}
    with pytest.raises(ConfigError, match=r"num_hidden_layers must be .* 4096"):
        parse_model_config({"architectures": [architecture], **sizes, **counts}, source="c.json")
