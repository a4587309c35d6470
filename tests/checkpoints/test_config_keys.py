"""Every key of a family's configuration class in transformers is honoured, refused or known to change nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import transformers

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.families import FAMILIES
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.errors import ConfigError

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
HARMLESS = {
    # Of training.
    *("attention_dropout", "embd_pdrop", "hidden_dropout", "initializer_range", "resid_pdrop"),
    *("attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"),
    *("output_router_logits", "residual_dropout", "router_aux_loss_coef", "router_jitter_noise"),
    # Of tensor-parallel training, where it adds up in another order.
    "pretraining_tp",
    # Of layers that predict several tokens at once, and of generation, and of how transformers runs.
    "num_mtp_layers",
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
    # Of layers with a state, which are refused by the kinds of layers.
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state"),
    *("mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
}
"""Keys that change nothing of what an answer is computed of."""
ELSEWHERE = {
    "rope_parameters": "test_config_json.py",
    "layer_types": "test_config_json.py",
    "max_position_embeddings": "not with YaRN, which tells the length itself",
    "original_max_position_embeddings": "part of LongRoPE alone",
    "max_window_layers": "with use_sliding_window",
    "use_sliding_window": "with max_window_layers",
    "sliding_window": "with use_sliding_window or layer_types",
    "num_experts_per_tok": "where there are experts",
    "intermediate_size": "where not all layers have experts",
    **dict.fromkeys(("block_ffn_dim_multiplier", "conv_L_cache", "conv_bias"), "test_families.py"),
    "intermediate_size_mlp": "where not all layers have experts",
}
"""Keys that mean something only beside others."""


def _parse(values: dict[str, Any]) -> ModelSpec:
    return parse_model_config(values, source="config.json")


def _others(value: object) -> list[object]:
    """Values that are not `value`, of its kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value + 2]
    if isinstance(value, str):
        return ["other"]
    return [True, 6, [1]]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_key_is_dropped_silently(name: str) -> None:
    config_class = getattr(transformers, name).config_class
    own = {field.name: field.default for field in dataclasses.fields(config_class)}
    general = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    base = {**BASE, "architectures": [name]}
    if name.startswith("GraniteMoeHybrid"):
        base |= {"layer_types": ["attention"] * 4, "num_local_experts": 0}
        base |= {"shared_intermediate_size": 96, "position_embedding_type": "rope"}
    if name.endswith("SequenceClassification"):
        base["num_labels"] = 1
    expected = _parse(base)
    dropped = set()
    for key, usual in own.items():
        if key in general | HARMLESS | ELSEWHERE.keys():
            continue
        if key == "tie_word_embeddings" and expected.encoder is not None:
            continue  # encoders have no head for words
        if key == "head_dim" and expected.latent is not None:
            continue  # transformers takes qk_rope_head_dim for it
        usual = base.get(key, usual)
        taken = []
        for other in _others(usual):
            with contextlib.suppress(ConfigError):
                taken.append(_parse({**base, key: other}))
        if expected in taken:
            dropped.add(key)
    assert not dropped


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_keys_have_the_values_of_transformers(name: str) -> None:
    base = dict(BASE)
    if name.startswith("GraniteMoeHybrid"):
        base |= {"layer_types": ["attention"] * 4, "num_local_experts": 0}
        base |= {"shared_intermediate_size": 96}
    if name.startswith(("Bert", "XLM")):
        base |= {"hidden_act": "gelu", "num_labels": 1}
    config = getattr(transformers, name).config_class(**base)
    filled = config.to_dict() | {"architectures": [name]}
    assert _parse(base | {"architectures": [name]}) == _parse(filled)
