# SPDX-License-Identifier: Apache-2.0
"""Fields that constrain answers: what the engine is sent, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from pagoda.api.bodies.constraint_fields import constraint_of
from pagoda.api.openai.bodies import ChatRequest
from pagoda.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "x", "description": "y", "strict": True, "schema": SCHEMA}


def body(**fields: Any) -> ChatRequest:
    return ChatRequest(messages=[], **fields)


def _named(**inner: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "json_schema", '"a"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "json_schema",
            "object",
        ),
        ({"response_format": {"type": "json_object"}}, "json_schema", '"object"'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", '"a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", '"a"'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", '"a"'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", "object"),
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "lark", '"a" | "b"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "lark", "start"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"}, "json_schema", "[ ]?"),
        ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "lark", '"a"'),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "lark", "start"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", '"a"'),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "regex", "a"),
    ],
)
def test_every_spelling(fields: dict[str, Any], kind: str, text: str) -> None:
    found = constraint_of(body(**fields))
    assert found is not None
    assert found.grammar.kind == kind
    assert text in found.grammar.text


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}]
)
def test_no_constraint(fields: dict[str, Any]) -> None:
    assert constraint_of(body(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 1}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"yaml": "x"}}, "structured_outputs.yaml"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": 1}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_decoding_backend": "magic"}, "guided_decoding_backend"),
        ({"ebnf": "nonsense"}, "ebnf"),
        ({"regex": 1}, "regex"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        constraint_of(body(**fields))
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("/api/chat", {"format": "json", "stream": False}, "format"),
        ("/completion", {"prompt": "x", "grammar": 'root ::= "a"'}, "grammar"),
        ("/completion", {"prompt": "x", "json_schema": {}}, "json_schema"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "max_tokens": 4},
            "output_config.format",
        ),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_object"}}},
            "text.format",
        ),
    ],
)
async def test_a_refusal_of_the_engine_names_the_clients_field(
    serve_api, path: str, fields: dict[str, Any], param: str
) -> None:
    api = await serve_api("x")
    api.endpoint.raises = InvalidRequestError("the grammar allows no answer.")
    body = {"model": "tiny", **fields}
    if path not in ("/completion", "/v1/responses"):
        body["messages"] = [{"role": "user", "content": "x"}]
    answer = await api.post(path, body)
    assert answer.status == 400
    assert f"{param}: the grammar allows no answer." in str(answer.json())


def test_what_is_not_strict_passes_over_what_no_grammar_holds() -> None:
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
            "n": {"oneOf": [{"type": "integer"}, {"type": "number"}], "multipleOf": 99991},
            "s": {"type": "string", "pattern": "^(?=a).*$"},
            "o": {"type": "object", "propertyNames": {"pattern": "^a"}},
        },
    }
    found = constraint_of(body(**_named(name="x", schema=schema, strict=False)))
    assert found is not None
    grammar = LLMatcher.grammar_from_json_schema(found.grammar.text)
    assert LLMatcher.validate_grammar(grammar) == ""
    strict = constraint_of(body(**_named(name="x", schema=schema["properties"]["tags"])))
    assert strict is not None
    grammar = LLMatcher.grammar_from_json_schema(strict.grammar.text)
    assert "uniqueItems" in LLMatcher.validate_grammar(grammar)


def test_one_grammar_in_several_spellings_is_one_grammar() -> None:
    """guidance's client of vLLM sends its grammar under the name of old servers and of new ones."""
    lark = '%llguidance {}\n\nstart: "a" | /b+/'
    found = constraint_of(body(guided_grammar=lark, structured_outputs={"grammar": lark}))
    assert found is not None
    assert (found.grammar.kind, found.grammar.text) == ("lark", lark)
    found = constraint_of(body(guided_json=SCHEMA, json_schema=json.dumps(SCHEMA)))
    assert found is not None
    with pytest.raises(InvalidRequestError, match="guided_grammar and structured_outputs both"):
        constraint_of(body(guided_grammar=lark, structured_outputs={"grammar": 'start: "c"'}))
