# SPDX-License-Identifier: Apache-2.0
"""Shapes of models in GGUF metadata, and errors of metadata that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_files import add_values, finish

from pagoda.checkpoints.gguf.config import config_values
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.errors import ConfigError

KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def values(path: Path, changes: dict[str, Any], *, table: tuple[int, ...] = (10, 64)) -> Any:
    """The config of a file with the keys above, changed; None takes one away."""
    writer = GGUFWriter(path / "m.gguf", "llama")
    # The writer has put the architecture in already.
    writer.kv_data[0].clear()
    given = KEYS | changes
    add_values(writer, {key: value for key, value in given.items() if value is not None})
    if table:
        writer.add_tensor("token_embd.weight", np.zeros(table, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(64, dtype=np.float32))
    finish(writer)
    return config_values(read_gguf(path / "m.gguf"))


def test_what_is_absent_has_its_usual_value(tmp_path: Path) -> None:
    config = values(tmp_path, {})
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": pytest.approx(1e-5),
        "rope_theta": 10_000.0,
        "rope_scaling": {"rope_type": "default"},
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "partial_rotary_factor": 1,
    }


def test_rotary_scalings(tmp_path: Path) -> None:
    prefix = "llama.rope.scaling"
    assert values(tmp_path, {f"{prefix}.type": "none"})["rope_scaling"] == {"rope_type": "default"}
    linear = {"rope_type": "linear", "factor": 4.0}
    asked = {f"{prefix}.type": "linear", f"{prefix}.factor": 4.0}
    assert values(tmp_path, asked)["rope_scaling"] == linear
    assert values(tmp_path, {"llama.rope.scale_linear": 4.0})["rope_scaling"] == linear
    asked |= {f"{prefix}.type": "yarn", f"{prefix}.original_context_length": 128}
    assert values(tmp_path, asked)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


@pytest.mark.parametrize("name", ["attn_factor", "yarn_attn_factor"])
def test_a_temperature_of_yarn_that_is_named(name: str, tmp_path: Path) -> None:
    prefix = "llama.rope.scaling"
    asked = {f"{prefix}.type": "yarn", f"{prefix}.factor": 8.0}
    asked |= {f"{prefix}.original_context_length": 8192}
    named = {**asked, f"{prefix}.{name}": 1.2079441541679836}
    assert values(tmp_path, named) == values(tmp_path, asked)


def test_layers_with_a_delta_rule_by_their_flags(tmp_path: Path) -> None:
    given = {name.replace("llama.", "qwen35."): value for name, value in KEYS.items()}
    given |= {"general.architecture": "qwen35", "qwen35.attention.recurrent_layers": [True, False]}
    given |= {"qwen35.ssm.inner_size": 64, "qwen35.ssm.time_step_rank": 4}
    taken = dict.fromkeys(name for name in KEYS if name.startswith("llama."))
    found = values(tmp_path, {**taken, **given})
    assert found["layer_types"] == ["linear_attention", "full_attention"]


def test_a_sliding_window_makes_a_mistral(tmp_path: Path) -> None:
    config = values(tmp_path, {"llama.attention.sliding_window": 128})
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "llamas"},
            "general.architecture is none that Pagoda runs, the nearest of which are llama, ",
        ),
        (
            {"general.architecture": "deepseek3"},
            "the nearest of which are deepseek, deepseek2 and ",
        ),
        ({"llama.block_count": None}, "lacks llama.block_count, a positive integer."),
        ({"llama.block_count": 9}, "block_count must not be more than the 2 tensors, got 9."),
        ({"llama.context_length": 0}, "context_length must be a positive integer, got 0."),
        (
            {"llama.attention.head_count": [4, 4]},
            "head_count must be a positive integer, got [4, 4].",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_epsilon, a positive number."),
        ({"llama.attention.key_length": 15}, "key_length must be even, got 15."),
        ({"llama.attention.value_length": 8}, "value_length must be the key length 16, got 8."),
        (
            {"llama.rope.dimension_count": 8, "llama.attention.sliding_window": 128},
            "dimension_count must be the key length 16, got 8.",
        ),
        ({"llama.logit_scale": 8.0}, "logit_scale is not supported in models of llama, got 8.0."),
        ({"llama.rope.freq_base": float("nan")}, "freq_base must be a positive number, got nan."),
        (
            {"llama.rope.scaling.type": "longrope"},
            "llama.rope.scaling.type must be one of none, linear, yarn, got 'longrope'.",
        ),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.attn_factor": 0.5},
            "attn_factor must be 1, got 0.5.",
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.attn_factor": 0.5,
            },
            "attn_factor must be 1, or 1.2079 as the factor has it, got 0.5.",
        ),
        (
            {"tokenizer.ggml.tokens": ["a"] * 11},
            "tokenizer.ggml.tokens has 11 tokens, but token_embd.weight 10 rows.",
        ),
        (
            {"llama.embedding_length": 32},
            "token_embd.weight has shape [10, 64], but its rows must be of the embedding length 32.",
        ),
    ],
)
def test_wrong_metadata_is_one_sentence(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        values(tmp_path, changes)
    assert str(caught.value).startswith(str(tmp_path / "m.gguf"))
    assert message in str(caught.value)


def test_windows_of_other_architectures_and_missing_tables(tmp_path: Path) -> None:
    qwen = {key.replace("llama", "qwen2"): value for key, value in KEYS.items()}
    asked = qwen | {"general.architecture": "qwen2", "qwen2.attention.sliding_window": 8}
    with pytest.raises(ConfigError, match="sliding_window is not supported in models of qwen2"):
        values(tmp_path, asked)
    with pytest.raises(ConfigError, match=r"lacks the tensor token_embd\.weight\."):
        values(tmp_path, {}, table=())


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("attention.causal", False, True),
        ("attention.max_alibi_bias", 8.0, 0.0),
        ("attention.output_scale", 0.5, 1.0),
        ("attention.shared_kv_layers", 1, 0),
        ("attention.sliding_window_pattern", 2, 0),
        ("router_logit_softcapping", 30.0, 0.0),
        ("swiglu_clamp_exp", [7.0, 7.0], [0.0, 0.0]),
        ("embedding_length_per_layer_input", 256, 0),
        ("full_attention_interval", 4, 0),
        ("rope.scaling.alpha", 1000.0, 1.0),
        ("logit_scale", 0.5, 1.0),
        ("something.new", "yes", None),
    ],
)
def test_keys_that_a_family_does_not_read(
    key: str, value: object, neutral: object, tmp_path: Path
) -> None:
    usual = values(tmp_path, {})
    assert values(tmp_path, {f"llama.{key}": neutral}) == usual
    with pytest.raises(ConfigError, match=rf"m\.gguf: llama\.{key} is not supported"):
        values(tmp_path, {f"llama.{key}": value})


def test_windows_by_their_pattern(tmp_path: Path) -> None:
    path = tmp_path
    given = {name.replace("llama.", "gemma3."): value for name, value in KEYS.items()}
    given["general.architecture"] = "gemma3"
    taken = dict.fromkeys(name for name in KEYS if name.startswith("llama."))
    for pattern, said in ((2, {"sliding_window_pattern": 2}), (None, {})):
        found = values(path, {**taken, **given, "gemma3.attention.sliding_window_pattern": pattern})
        assert found.items() >= said.items()


def test_heads_of_keys_layer_by_layer_are_as_many_as_layers(tmp_path: Path) -> None:
    """A list costs no more than its length, whatever a header has in it."""
    keys = {key.replace("llama", "plamo2"): value for key, value in KEYS.items()}
    own = {**dict.fromkeys(KEYS), **keys, "general.architecture": "plamo2"}
    own |= {"plamo2.ssm.inner_size": 64, "plamo2.ssm.time_step_rank": 4}
    of_layers = "plamo2.attention.head_count_kv"
    for counts, said in (
        ([0] * 100_000 + [1], "must have 2 numbers, one for each layer"),
        ([0, 0], "must be of every so manyth layer"),
    ):
        with pytest.raises(ConfigError, match=rf"head_count_kv {said}"):
            values(tmp_path, {**own, of_layers: counts})
    assert values(tmp_path, {**own, of_layers: [0, 1]})["mamba_step"] == 2
