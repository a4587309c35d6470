# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from pagoda.api.bodies.body import LARGE_BODY_BYTES, parse_body
from pagoda.api.bodies.body_structure import (
    MAX_ARRAYS,
    MAX_ESCAPES,
    MAX_OBJECTS,
    MAX_STRINGS,
    MAX_VALUES,
    check_structure,
)
from pagoda.api.openai.bodies import ChatRequest, CompletionRequest
from pagoda.errors import InvalidRequestError

TOO_MUCH = [
    ([[]] * (MAX_ARRAYS + 1), "arrays"),
    ([{}] * (MAX_OBJECTS + 1), "objects"),
    ([""] * (MAX_STRINGS + 1), "strings"),
    ({f'"{i}\\': 1 for i in range(MAX_STRINGS + 1)}, "strings"),
    ([1] * (MAX_VALUES + 2), "values"),
    ("\\" * (MAX_ESCAPES // 2 + 1), "escapes in its strings"),
]


@pytest.mark.parametrize(("value", "what"), TOO_MUCH, ids=[what for _, what in TOO_MUCH])
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(
    value: object, what: str
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": value}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": schema}
    with pytest.raises(InvalidRequestError, match=f"the body has more than [0-9]+ {what}"):
        parse_body(json.dumps(body).encode(), ChatRequest)


@pytest.mark.parametrize("mark", ["[", "{", ",", '"', '"[', "\\", "中"])
def test_what_a_prompt_says_counts_for_nothing(mark: str) -> None:
    prompt = mark * (MAX_VALUES + 1 if mark == "," else 2 * MAX_STRINGS + 2)
    assert len(prompt) > LARGE_BODY_BYTES
    body = json.dumps({"prompt": prompt}).encode()
    assert parse_body(body, CompletionRequest).prompt == prompt


def test_text_that_is_no_json_is_left_to_the_decoder() -> None:
    check_structure(b'"' * 1000)
    check_structure(b"\\" * 1000)
