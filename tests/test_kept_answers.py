# SPDX-License-Identifier: Apache-2.0
"""Answers that are kept are not asked for again, and belong to all that determines them."""

from __future__ import annotations

from pathlib import Path

import torch
from kept_answers import KeptAnswers, key_of


class Config:
    def __init__(self, **fields: object) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, object]:
        return self.fields


class Model:
    def __init__(self, weight: list[float], **fields: object) -> None:
        self.config = Config(**fields)
        self.weight = torch.tensor(weight)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}


def fail() -> list[int]:
    raise AssertionError("nobody need answer")


def test_an_answer_is_computed_once_for_each_version(tmp_path: Path) -> None:
    first = KeptAnswers(tmp_path / "answers.json", tmp_path / "cache")
    assert first.find("5.0", "a", lambda: [1, 2]) == [1, 2]
    second = KeptAnswers(tmp_path / "answers.json", tmp_path / "cache")
    assert second.find("5.0", "a", fail) == [1, 2]
    assert second.find("5.1", "a", lambda: [3]) == [3]
    assert not (tmp_path / "answers.json").exists()


def test_answers_of_the_repository_are_of_one_version(tmp_path: Path) -> None:
    kept = KeptAnswers(tmp_path / "answers.json", tmp_path / "cache")
    kept.anew = True
    assert kept.find("5.0", "a", lambda: [1]) == [1]
    assert kept.find("5.0", "a", fail) == [1], "the same run need not answer twice"
    kept.keep("5.0", kept.added)
    kept.keep("5.0", {"b": [2]})
    read = KeptAnswers(tmp_path / "answers.json", tmp_path / "elsewhere")
    assert (read.find("5.0", "a", fail), read.find("5.0", "b", fail)) == ([1], [2])
    assert read.find("5.1", "a", lambda: [7]) == [7]
    read.anew = True
    assert read.find("5.0", "a", lambda: [9]) == [9]
    read.keep("5.1", {"c": [3]})
    assert KeptAnswers(tmp_path / "answers.json", tmp_path / "x").find("5.0", "a", lambda: [4]) == [
        4
    ]


def test_keys_differ_with_all_that_an_answer_depends_on() -> None:
    model = Model([1.0, 2.0], layers=2)
    keys = {
        key_of(model, [1, 2], 3),
        key_of(model, [1, 2], 4),
        key_of(model, [1, 3], 3),
        key_of(Model([1.0, 2.5], layers=2), [1, 2], 3),
        key_of(Model([1.0, 2.0], layers=3), [1, 2], 3),
        key_of(type("Other", (Model,), {})([1.0, 2.0], layers=2), [1, 2], 3),
    }
    assert len(keys) == 6
    assert key_of(Model([1.0, 2.0], layers=2, architectures=["M"]), [1, 2], 3) in keys
