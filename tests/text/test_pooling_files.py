# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_files import add_values, finish

from pagoda.checkpoints.gguf.reader import GgufFile, read_gguf
from pagoda.errors import ConfigError
from pagoda.messages.frontend import Pooling
from pagoda.text.pooling_files import PoolingDefaults, read_gguf_pooling, read_pooling

_PREFIX = "sentence_transformers.models."


def _save(directory: Path, kinds: list[str], pooling: dict[str, Any] | None) -> None:
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "1_Pooling" if kind == "Pooling" else "",
            "type": _PREFIX + kind,
        }
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("kinds", "pooling", "expected"),
    [
        (
            ["Transformer", "Pooling", "Normalize"],
            {
                "word_embedding_dimension": 4,
                "pooling_mode_lasttoken": True,
                "pooling_mode_cls_token": False,
            },
            PoolingDefaults(Pooling.LAST, normalize=True),
        ),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "include_prompt": True},
            PoolingDefaults(Pooling.MEAN, normalize=False),
        ),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode": "mean"},
            PoolingDefaults(Pooling.MEAN, normalize=False),
        ),
    ],
)
def test_files_of_sentence_transformers(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], expected: PoolingDefaults
) -> None:
    _save(tmp_path, kinds, pooling)
    assert read_pooling(tmp_path) == expected


def test_without_files_the_last_token_is_taken_and_normalised(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == PoolingDefaults(Pooling.LAST, normalize=True)


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (["Transformer", "CNN"], None, "modules.json.*CNN"),
        (["Pooling"], {"pooling_mode_max_tokens": True}, "config.json.*max_tokens"),
        (["Pooling"], {"pooling_mode_cls_token": True}, "only encoders are pooled so"),
        (
            ["Pooling"],
            {"pooling_mode_mean_tokens": True, "include_prompt": False},
            "leaves prompts out",
        ),
        (
            ["Pooling"],
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "must ask for one",
        ),
        (["Pooling"], None, "1_Pooling.*cannot be read"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any] | None, message: str
) -> None:
    _save(tmp_path, kinds, pooling)
    with pytest.raises(ConfigError, match=message):
        read_pooling(tmp_path)


def _config(directory: Path, architecture: str, **fields: Any) -> None:
    shape = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    values = {**shape, "intermediate_size": 8, "architectures": [architecture], **fields}
    (directory / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("BertModel", PoolingDefaults(Pooling.FIRST, task="embed", generates=False, encodes=True)),
        (
            "XLMRobertaForSequenceClassification",
            PoolingDefaults(
                Pooling.SCORE, task="score", generates=False, encodes=True, labels=("LABEL_0",)
            ),
        ),
        (
            "Qwen3ForSequenceClassification",
            PoolingDefaults(Pooling.SCORE, task="score", generates=False, labels=("LABEL_0",)),
        ),
        ("Qwen3ForCausalLM", PoolingDefaults()),
        ("Qwen3Model", PoolingDefaults()),
        ("Unheard", PoolingDefaults()),
    ],
)
def test_architectures_say_what_a_model_gives(
    tmp_path: Path, architecture: str, expected: PoolingDefaults
) -> None:
    _config(tmp_path, architecture, num_labels=1, max_position_embeddings=64)
    assert read_pooling(tmp_path) == expected


def test_the_first_token_of_an_encoder_is_pooled(tmp_path: Path) -> None:
    _config(tmp_path, "BertModel")
    _save(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_cls_token": True})
    found = read_pooling(tmp_path)
    assert (found.pooling, found.normalize) == (Pooling.FIRST, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_scores_that_stay_as_they_are(tmp_path: Path, fields: dict[str, Any]) -> None:
    _config(tmp_path, "BertForSequenceClassification", num_labels=1, **fields)
    assert read_pooling(tmp_path).scores == "identity"


def test_prompts(tmp_path: Path) -> None:
    path = tmp_path / "config_sentence_transformers.json"
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    path.write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    found = read_pooling(tmp_path)
    assert [found.prompt(name) for name in ("query", "document", None)] == [*prompts.values(), ""]
    path.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))
    assert read_pooling(tmp_path).prompt(None) == prompts["query"]
    path.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "other"}))
    with pytest.raises(ConfigError, match="has no prompt of its default_prompt_name 'other'"):
        read_pooling(tmp_path)


def _gguf(path: Path, architecture: str, **values: Any) -> GgufFile:
    """A file of one layer, as far as its metadata go."""
    writer = GGUFWriter(path / "m.gguf", architecture)
    shape = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 8,
        "feed_forward_length": 8,
    }
    epsilons = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-5}
    keys = {**shape, **epsilons, "attention.head_count": 2, **values}
    add_values(writer, {f"{architecture}.{key}": value for key, value in keys.items()})
    for name, rows in (("token_embd", 40), ("token_types", 2)):
        if name == "token_embd" or architecture == "bert":
            writer.add_tensor(f"{name}.weight", np.zeros((rows, 8), np.float32))
    finish(writer)
    return read_gguf(writer.path)


@pytest.mark.parametrize(
    ("architecture", "values", "expected"),
    [
        ("qwen3", {}, PoolingDefaults()),
        ("qwen3", {"pooling_type": 3}, PoolingDefaults(Pooling.LAST)),
        ("qwen3", {"pooling_type": 1}, PoolingDefaults(Pooling.MEAN)),
        (
            "bert",
            {"attention.causal": False},
            PoolingDefaults(Pooling.FIRST, task="embed", generates=False, encodes=True),
        ),
        (
            "bert",
            {"attention.causal": False, "pooling_type": 1},
            PoolingDefaults(Pooling.MEAN, task="embed", generates=False, encodes=True),
        ),
    ],
)
def test_gguf_files(
    architecture: str, values: dict[str, Any], expected: PoolingDefaults, tmp_path: Path
) -> None:
    assert read_gguf_pooling(_gguf(tmp_path, architecture, **values)) == expected


def test_gguf_files_of_decoders_do_not_pool_the_first_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qwen3\.pooling_type pools the first token, .* got 2"):
        read_gguf_pooling(_gguf(tmp_path, "qwen3", pooling_type=2))
