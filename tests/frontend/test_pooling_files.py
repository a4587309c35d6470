from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda.errors import ConfigError
from pagoda.frontend.pooling_files import PoolingDefaults, read_pooling
from pagoda.messages.frontend import Pooling

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
        (["Transformer", "Dense"], None, "modules.json.*Dense"),
        (["Pooling"], {"pooling_mode_cls_token": True}, "config.json.*cls_token"),
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
