# SPDX-License-Identifier: Apache-2.0
"""Encoders whose config.json tells in fields what others tell by the architecture's name."""

from __future__ import annotations

from typing import Any

import pytest

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.errors import ConfigError

_BASE: dict[str, Any] = {
    **{"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "max_position_embeddings": 512},
}


def parse(values: dict[str, Any], **changes: Any) -> ModelSpec:
    return parse_model_config(values | changes, source="config.json")


def test_the_encoder_within_colbert() -> None:
    colbert = {**_BASE, "architectures": ["HF_ColBERT"], "hidden_act": "gelu"}
    roberta = parse(colbert, model_type="xlm-roberta", pad_token_id=1)
    assert roberta.encoder is not None
    assert roberta.encoder.first_position == 2
    rotary = {"position_embedding_type": "rotary", "rotary_emb_base": 1e4}
    jina = parse(colbert, **rotary, model_type="xlm-roberta")
    assert (jina.names.query, jina.rotary["default"].theta) == ("mixer.Wqkv", 1e4)
    bert = parse(colbert, model_type="bert")
    assert bert.family.architecture == "BertModel"
    for spec in (roberta, jina, bert):
        assert "token_vectors" in spec.vector_maps
    with pytest.raises(ConfigError, match="model_type must be one of bert, roberta, xlm-roberta"):
        parse(colbert, model_type="electra")
