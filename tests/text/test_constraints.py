# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher
from test_ebnf import TOKENIZER, accepts

from pagoda.errors import InvalidRequestError
from pagoda.messages.frontend import Grammar
from pagoda.text.grammars.constraints import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    choice_grammar,
    json_grammar,
    json_object_grammar,
    language_grammar,
    regex_grammar,
)
from pagoda.text.grammars.lark import LarkWriter
from pagoda.text.grammars.schema_types import MAX_OPTIONAL

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {}}},
    "required": ["name"],
    "additionalProperties": False,
}


def holds(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(grammar.text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("indent", [None, 1, 2, 4, 8])
def test_json_is_accepted_as_models_write_it(indent: int | None) -> None:
    value = {"name": "é", "tags": [1, {"a": [None]}]}
    for grammar in (json_grammar(PERSON, "p"), json_object_grammar()):
        assert holds(grammar, json.dumps(value, indent=indent, ensure_ascii=False))
        assert holds(grammar, json.dumps(value, separators=(",", ":"), ensure_ascii=False))
        assert not holds(grammar, '{"name":  "two spaces"}')
        assert not holds(grammar, '{"name": "x"}' + "\n" * 3)


def test_white_space_as_asked_for() -> None:
    assert not holds(json_grammar(PERSON, "p", disable_whitespace=True), '{"name": "x"}')
    assert holds(json_grammar(PERSON, "p", whitespace="[ ]{0,3}"), '{   "name":   "x"}')


def test_schemas_as_text_and_booleans() -> None:
    assert json_grammar(json.dumps(PERSON), "p") == json_grammar(PERSON, "p")
    assert holds(json_grammar(True, "p"), "[1]")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^\d{3}$", "123"),
        (r"^\p{L}+$", "aé"),
        (r"^(?<year>\d)-\d$", "1-2"),
        ("a+", "xaay"),
        (r"^\/x$", "/x"),
    ],
)
def test_patterns_are_those_of_ecmascript(pattern: str, text: str) -> None:
    grammar = json_grammar({"type": "string", "pattern": pattern}, "p")
    assert holds(grammar, json.dumps(text, ensure_ascii=False))


def test_formats_that_nobody_checks_are_annotations() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "binary"}},
        "const": {"format": "kept"},
    }
    checked = json.loads(json_grammar(schema, "p").text)
    assert checked["properties"] == {"format": {"type": "string"}}
    assert checked["const"] == {"format": "kept"}
    assert '"date-time"' in json_grammar({"type": "string", "format": "date-time"}, "p").text


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON schema"),
        ({"multipleOf": 999983}, "multipleOf that takes too much work"),
        ({"multipleOf": 62_000_000}, "multipleOf that takes too much work"),
        ({"anyOf": [{"multipleOf": 97}, {"multipleOf": 101}, {"multipleOf": 103}]}, "multipleOf"),
        ({"enum": ["x" * MAX_GRAMMAR_BYTES]}, "bytes"),
        ({"const": "\ud800"}, "surrogate"),
        (json.loads('{"items":' * 200 + "{}" + "}" * 200), "nested more than"),
    ],
)
def test_schemas_that_are_refused_at_the_door(schema: object, fault: str) -> None:
    with pytest.raises(InvalidRequestError, match=fault) as caught:
        json_grammar(schema, "response_format.json_schema.schema")  # type: ignore[arg-type]
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("value", [0.01, 0.25, 5, 60, 3600, 86400, 10000])
def test_usual_multiples_are_served(value: float) -> None:
    json_grammar({"type": "number", "multipleOf": value}, "p")


def test_a_multiple_that_is_no_number_is_left_to_the_engine() -> None:
    assert "true" in json_grammar({"multipleOf": True}, "p").text


def test_as_many_choices_as_are_allowed_can_be_followed() -> None:
    grammar = choice_grammar([f"choice {index}" for index in range(MAX_CHOICES)], "p")
    assert accepts(grammar.text, f"choice {MAX_CHOICES - 1}")
    assert not accepts(grammar.text, f"choice {MAX_CHOICES}")


def test_choices() -> None:
    grammar = choice_grammar(["yes", 'n"o/', "vielleicht é"], "guided_choice")
    assert accepts(choice_grammar(["a\x7f\x01b"], "guided_choice").text, "a\x7f\x01b")
    for text in ("yes", 'n"o/', "vielleicht é"):
        assert accepts(grammar.text, text)
    assert not accepts(grammar.text, "ye")
    for wrong in ([], "yes", [1], None, ["a"] * 5000):
        with pytest.raises(InvalidRequestError, match="guided_choice"):
            choice_grammar(wrong, "guided_choice")


def test_languages_are_told_apart() -> None:
    lark = 'start: "a" b\nb: /x+/'
    assert language_grammar(lark, "p") == Grammar("lark", lark)
    assert accepts(language_grammar('root ::= "a" b\nb ::= "x"+', "p").text, "axx")
    for wrong in ("", None, 7, 'start: %json {"type": "string"}'):
        with pytest.raises(InvalidRequestError, match=r"^p "):
            language_grammar(wrong, "p")


def test_expressions() -> None:
    assert regex_grammar("a+", "p") == Grammar("regex", "a+")
    for wrong in (None, 1, "a" * (MAX_GRAMMAR_BYTES + 1)):
        with pytest.raises(InvalidRequestError, match=r"^p "):
            regex_grammar(wrong, "p")


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (json_grammar(PERSON, "p", disable_whitespace=True), '{"name":"x"}', '{"nam":"x"}'),
        (regex_grammar(r"a/b\/c\d\n", "p"), "a/b/c1\n", "a/b"),
        (choice_grammar(["start", "b"], "p"), "start", "star"),
        (
            language_grammar('%llguidance {}\n// start\nstart: A start "z" | "start"\nA: /q/', "p"),
            "qqstartzz",
            "qstart",
        ),
        (
            language_grammar('start: r1 TEXT GAP T1\nr1: "a"\nTEXT: "b"\nGAP: "c"\nT1: "d"', "p"),
            "abcd",
            "axcd",
        ),
    ],
)
def test_a_grammar_within_another(grammar: Grammar, inside: str, outside: str) -> None:
    writer = LarkWriter(lambda _: None, ())
    whole = writer.grammar(f'"<" {writer.content(grammar)} ">"')
    assert accepts(whole, f"<{inside}>")
    assert not accepts(whole, f"<{outside}>")


def test_lines_in_errors_are_those_of_the_author() -> None:
    writer = LarkWriter(lambda _: None, ())
    inner = writer.content(Grammar("lark", 'start: "a" b\nb: foo'))
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(writer.grammar(inner)), log_level=0)
    assert "2(4)" in matcher.get_error()


def test_an_object_of_too_many_optional_properties_is_refused() -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(MAX_OPTIONAL + 2)}
    schema = {"type": "object", "properties": properties, "required": ["p0"]}
    with pytest.raises(InvalidRequestError, match="p has an object with more than 500 properties"):
        json_grammar({"items": schema}, "p")
    schema["required"] = ["p0", "p1"]
    json_grammar({"items": schema}, "p")
