# SPDX-License-Identifier: Apache-2.0
"""Schemas of tools in the form that grammars can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.errors import refuse
from pagoda.text.grammars.schema_multiples import MAX_STEPS, steps_of, takes_too_much
from pagoda.text.grammars.schema_types import MAX_OPTIONAL, has_too_many_optional
from pagoda.text.json_size import json_size

MAX_SCHEMA_BYTES = 128 << 10
"""Bytes of the schema of one tool that an answer is held to."""
MAX_TOTAL_BYTES = 256 << 10
_NO_SCHEMAS = frozenset(("const", "enum", "default", "examples"))
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_COMPOSING = frozenset(("$ref", "allOf", "anyOf", "oneOf", "patternProperties"))
"""Keywords that may declare arguments beside `properties`."""
_NOT_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<")
"""Look-around and references back, which no automaton follows."""


def held_schema(schema: Mapping[str, Any], name: str, *, is_strict: bool) -> Mapping[str, Any]:
    """The schema of tool `name`, without arguments that it does not declare. If it is not strict, it is without
    keywords that are too much for an automaton.
    Raises InvalidRequestError: it is too large or too deep, or it is strict and has such a `multipleOf`."""
    try:
        if json_size(schema, MAX_SCHEMA_BYTES) > MAX_SCHEMA_BYTES:
            refuse("tools", f"has a schema of {name!r} with more than {MAX_SCHEMA_BYTES} bytes")
        if has_too_many_optional(schema):
            rule = f"has a schema of {name!r} with more than {MAX_OPTIONAL} optional properties"
            refuse("tools", rule)
        return _closed(_strict(schema, name) if is_strict else eased_schema(schema))
    except RecursionError:
        refuse("tools", f"has a schema of {name!r} that is nested too deeply")


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with no arguments but those that it declares, unless it says that there are others."""
    if "properties" not in schema or not _COMPOSING.isdisjoint(schema):
        return schema
    return {"additionalProperties": False, **schema}


def check_total(schemas: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidRequestError: the schemas that one answer is held to are too large together."""
    if json_size(schemas, MAX_TOTAL_BYTES) > MAX_TOTAL_BYTES:
        refuse("tools", f"has schemas with more than {MAX_TOTAL_BYTES} bytes together")


def _strict(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    multiples: list[int] = []
    _without(schema, set(), multiples)
    if takes_too_much(multiples):
        rule = f"has a multipleOf in the schema of {name!r} that takes more than {MAX_STEPS} steps"
        refuse("tools", rule)
    return schema


def eased_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without patterns that are not regular, and without `multipleOf` if it takes too much.
    Raises RecursionError: it is too deep."""
    multiples: list[int] = []
    eased: dict[str, Any] = _without(schema, {"pattern"}, multiples)
    if takes_too_much(multiples):
        eased = _without(schema, {"pattern", "multipleOf"}, multiples)
    return eased


def _without(schema: Any, dropped: set[str], multiples: list[int]) -> Any:
    """The schema without `dropped` keywords, of patterns those that are not regular; notes each `multipleOf`."""
    if isinstance(schema, list):
        return [_without(part, dropped, multiples) for part in schema]
    if not isinstance(schema, dict):
        return schema
    held: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NO_SCHEMAS:
            held[name] = value
        elif name in _BY_NAME and isinstance(value, dict):
            held[name] = {key: _without(part, dropped, multiples) for key, part in value.items()}
        elif name == "multipleOf" and (steps := steps_of(value)) is not None:
            multiples.append(steps)
            if name not in dropped:
                held[name] = value
        elif not (name in dropped and isinstance(value, str) and _NOT_REGULAR.search(value)):
            held[name] = _without(value, dropped, multiples)
    return held
