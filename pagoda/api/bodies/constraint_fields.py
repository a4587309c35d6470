# SPDX-License-Identifier: Apache-2.0
"""The fields by which bodies constrain answers, in the spelling of OpenAI, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pagoda.api.bodies.fields import GenerationFields
from pagoda.concurrency.async_utils import LONG_TEXT_CHARS
from pagoda.errors import refuse
from pagoda.messages.frontend import Grammar
from pagoda.text.draft import FieldGrammar
from pagoda.text.grammars.constraints import (
    check_names,
    grammar_of,
    json_object_grammar,
    structured_grammar,
)
from pagoda.text.json_size import json_size

_BACKENDS = ("auto", "guidance", "llguidance", "xgrammar", "outlines", "lm-format-enforcer")
_NAMED_BY_KIND = {"regex": "regex", "ebnf": "grammar", "grammar": "grammar", "json_schema": "json"}
"""Fields of SGLang and llama.cpp, and the kind of their constraint."""
_CONSTRAINTS = ("response_format", "structured_outputs", *_NAMED_BY_KIND)
_CONSTRAINTS += ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def constraint_size(body: GenerationFields) -> int:
    """Characters of a body's constraints, roughly, of which `constraint_of` makes a grammar in linear time. Those
    beyond a long text are not counted."""
    return json_size([getattr(body, name) for name in _CONSTRAINTS], LONG_TEXT_CHARS)


def constraint_of(body: GenerationFields) -> FieldGrammar | None:
    """The grammar that a body holds its answers to; None without one.
    Raises InvalidRequestError: a constraint is wrong, or there are two that differ; names the fields."""
    guided = {
        name: value
        for name in ("json", "regex", "choice", "grammar")
        if (value := getattr(body, f"guided_{name}")) is not None
    }
    asked: list[tuple[str, Callable[[], Grammar | None]]] = []
    if body.response_format is not None:
        asked.append(("response_format", partial(_response_format, body.response_format)))
    if body.structured_outputs is not None:
        asked.append(
            (
                "structured_outputs",
                partial(structured_grammar, body.structured_outputs, "structured_outputs"),
            )
        )
    pattern = body.guided_whitespace_pattern
    for name, value in guided.items():
        options = {"whitespace": pattern} if name == "json" and pattern is not None else {}
        asked.append(
            (f"guided_{name}", partial(grammar_of, name, value, f"guided_{name}", options))
        )
    for name, kind in _NAMED_BY_KIND.items():
        if (value := getattr(body, name)) is not None:
            asked.append((name, partial(grammar_of, kind, value, name, {})))
    if body.guided_decoding_backend not in (None, *_BACKENDS):
        refuse("guided_decoding_backend", f"must be one of {', '.join(_BACKENDS)}")
    found = [
        FieldGrammar(grammar, param) for param, make in asked if (grammar := make()) is not None
    ]
    for other in found[1:]:  # clients of several servers spell one grammar in several ways
        if other.grammar != found[0].grammar:
            both = f"and {found[0].param} both constrain the answer; give one of them"
            refuse(other.param, both)
    return found[0] if found else None


def _response_format(value: Any) -> Grammar | None:
    """The grammar of OpenAI's `response_format`."""
    param = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        refuse(f"{param}.type", "must be text, json_object or json_schema")
    if kind == "text":
        check_names(value, {"type"}, param)
        return None
    if kind == "json_object":
        check_names(value, {"type", "schema"}, param)
        if value.get("schema") is None:
            return json_object_grammar()
        return grammar_of("json", value["schema"], f"{param}.schema", {})  # as llama.cpp has it
    check_names(value, {"type", "json_schema"}, param)
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        refuse(f"{param}.json_schema", "must be an object with name and schema")
    check_names(inner, {"name", "description", "schema", "strict"}, f"{param}.json_schema")
    for name, kinds in (("name", str), ("description", str), ("strict", bool)):
        if not isinstance(inner.get(name), kinds | None):
            refuse(f"{param}.json_schema.{name}", f"must be of type {kinds.__name__}")
    schema = inner.get("schema")
    if schema is None:
        return json_object_grammar()
    options = {"is_strict": inner.get("strict") is not False}
    return grammar_of("json", schema, f"{param}.json_schema.schema", options)
