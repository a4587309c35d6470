# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from pagoda.cli.options import AnswerOptions, ConstraintOptions, SamplingOptions
from pagoda.errors import ConfigError, PagodaError


def test_a_body_holds_only_what_was_given() -> None:
    assert SamplingOptions().body() == {}
    assert AnswerOptions().body(None) == {}
    assert SamplingOptions(temperature=0.0, top_k=3).body() == {"temperature": 0.0, "top_k": 3}
    options = AnswerOptions(max_tokens=5, stop=("a", "b"))
    assert options.body(3) == {"max_tokens": 5, "stop": ["a", "b"], "seed": 3}


def test_a_constraint_becomes_a_field(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"type": "integer"}')
    assert ConstraintOptions().body() == {}
    assert ConstraintOptions(json_schema=file).body() == {
        "structured_outputs": {"json": '{"type": "integer"}'}
    }
    assert ConstraintOptions(choice=("a", "b")).body() == {
        "structured_outputs": {"choice": ["a", "b"]}
    }
    file.write_text('start: "a"')
    assert ConstraintOptions(grammar=file).body() == {
        "structured_outputs": {"grammar": 'start: "a"'}
    }


def test_constraints_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"{\xff")
    with pytest.raises(ConfigError, match=r"--json-schema: .* is not UTF-8"):
        ConstraintOptions(json_schema=file).body()
    with pytest.raises(ConfigError, match="--grammar"):
        ConstraintOptions(grammar=tmp_path / "none").body()
    file.write_text("{")
    with pytest.raises(PagodaError, match="--json-schema must be a JSON schema"):
        ConstraintOptions(json_schema=file).body()
    with pytest.raises(ConfigError, match="--json-schema and --regex both constrain answers"):
        ConstraintOptions(json_schema=file, regex="a").body()
