"""The fields by which bodies constrain answers, in OpenAI's, vLLM's and SGLang's spelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from pagoda.api.fields import GenerationFields
from pagoda.errors import refuse
from pagoda.frontend.constraints import (
    choice_grammar,
    json_grammar,
    json_object_grammar,
    language_grammar,
    regex_grammar,
)
from pagoda.frontend.json_size import json_size
from pagoda.messages.frontend import Grammar

_BACKENDS = ("auto", "guidance", "llguidance", "xgrammar", "outlines", "lm-format-enforcer")
_JSON_OPTIONS = {
    "whitespace_pattern": "whitespace",
    "disable_any_whitespace": "disable_whitespace",
}
_NEUTRAL_OPTIONS = ("disable_fallback", "disable_additional_properties", "_backend")
_CONSTRAINTS = ("response_format", "structured_outputs", "json_schema", "regex", "ebnf")
_CONSTRAINTS += ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_MAX_SIZE = 1 << 20
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class FieldGrammar(NamedTuple):
    """A grammar, and the field that asks for it."""

    grammar: Grammar
    param: str


def constraint_size(body: GenerationFields) -> int:
    """Characters of a body's constraints, roughly, of which `constraint_of` makes a grammar in linear time."""
    return json_size([getattr(body, name) for name in _CONSTRAINTS], _MAX_SIZE)


def constraint_of(body: GenerationFields) -> FieldGrammar | None:
    """The grammar that a body holds its answers to; None without one.
    Raises InvalidRequestError: a constraint is wrong, or there are two; names the fields."""
    guided = {
        name: value
        for name in ("json", "regex", "choice", "grammar")
        if (value := getattr(body, f"guided_{name}")) is not None
    }
    asked: list[tuple[str, Callable[[], Grammar | None]]] = []
    if body.response_format is not None:
        asked.append(("response_format", partial(_response_format, body.response_format)))
    if body.structured_outputs is not None:
        asked.append(("structured_outputs", partial(_structured, body.structured_outputs)))
    pattern = body.guided_whitespace_pattern
    for name, value in guided.items():
        options = {"whitespace": pattern} if name == "json" and pattern is not None else {}
        asked.append((f"guided_{name}", partial(_made, name, value, f"guided_{name}", options)))
    for name, kind in (("regex", "regex"), ("ebnf", "grammar"), ("json_schema", "json")):
        if (value := getattr(body, name)) is not None:
            asked.append((name, partial(_made, kind, value, name, {})))
    if body.guided_decoding_backend not in (None, *_BACKENDS):
        refuse("guided_decoding_backend", f"must be one of {', '.join(_BACKENDS)}")
    found = [
        FieldGrammar(grammar, param) for param, make in asked if (grammar := make()) is not None
    ]
    if len(found) > 1:
        refuse(found[1].param, f"and {found[0].param} both constrain the answer; give one of them")
    return found[0] if found else None


def _made(kind: str, value: Any, param: str, options: Mapping[str, Any]) -> Grammar:
    match kind:
        case "json":
            if not isinstance(value, dict | str | bool):
                refuse(param, "must be a JSON schema, as an object or as its text")
            return json_grammar(value, param, **options)
        case "regex":
            return regex_grammar(value, param)
        case "choice":
            return choice_grammar(value, param)
    return language_grammar(value, param)


def _response_format(value: Any) -> Grammar | None:
    """The grammar of OpenAI's `response_format`."""
    param = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        refuse(f"{param}.type", "must be text, json_object or json_schema")
    if kind == "text":
        _check_names(value, {"type"}, param)
        return None
    if kind == "json_object":
        _check_names(value, {"type", "schema"}, param)
        if value.get("schema") is None:
            return json_object_grammar()
        return _made("json", value["schema"], f"{param}.schema", {})  # as llama.cpp has it
    _check_names(value, {"type", "json_schema"}, param)
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        refuse(f"{param}.json_schema", "must be an object with name and schema")
    _check_names(inner, {"name", "description", "schema", "strict"}, f"{param}.json_schema")
    for name, kinds in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(inner.get(name), kinds | None):
            refuse(f"{param}.json_schema.{name}", f"must be of type {kinds.__name__}")
    schema = inner.get("schema")
    if schema is None:
        return json_object_grammar()
    return _made("json", schema, f"{param}.json_schema.schema", {})


def _structured(value: Any) -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`."""
    param = "structured_outputs"
    if not isinstance(value, dict):
        refuse(param, f"must be an object with one of {', '.join(_KINDS)}")
    given = {name: part for name, part in value.items() if part is not None}
    if "structural_tag" in given:
        refuse(f"{param}.structural_tag", "is not supported", "not_supported")
    _check_names(given, {*_KINDS, *_JSON_OPTIONS, *_NEUTRAL_OPTIONS}, param)
    if given.get("disable_additional_properties"):
        refuse(f"{param}.disable_additional_properties", "is not supported", "not_supported")
    kinds = [name for name in _KINDS if given.get(name, False) is not False]
    if len(kinds) > 1:
        refuse(f"{param}.{kinds[1]}", f"and {kinds[0]} both constrain the answer; give one of them")
    options = {theirs: given[ours] for ours, theirs in _JSON_OPTIONS.items() if ours in given}
    if not isinstance(options.get("whitespace"), str | None):
        refuse(f"{param}.whitespace_pattern", "must be a regular expression, a string")
    if not kinds:
        return None
    (kind,) = kinds
    if kind == "json_object":
        return json_grammar({"type": "object"}, f"{param}.json_object", **options)
    return _made(kind, given[kind], f"{param}.{kind}", options)


def _check_names(value: Mapping[str, Any], known: set[str], param: str) -> None:
    for name, part in value.items():
        if name not in known and part is not None:
            refuse(f"{param}.{str(name)[:64]}", "is not a known field", "unknown_field")
