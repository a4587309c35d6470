# SPDX-License-Identifier: Apache-2.0
"""The types of values by their JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
MAX_OPTIONAL = 500
"""Properties of one object that may be left out: a parser keeps four items for each of them."""
_MAX_DEPTH = 8
"""Levels of `anyOf` that are looked into, and references that are followed one behind another."""

_MAX_VALUES = 256
"""Values of an `enum`, and choices, that are looked at."""


def type_name(value: object) -> str:
    """The name of a JSON value's type; empty for other values."""
    return _TYPES.get(type(value), "")


def resolved(schema: object, root: object) -> object:
    """The schema, or the one that it refers to within `root`; None if there is none."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        place, *steps = str(schema["$ref"]).split("/")
        schema = root if place == "#" else None
        for step in steps:
            name = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return None


def types_of(schema: object, root: object = None, depth: int = _MAX_DEPTH) -> frozenset[str]:
    """The types that a value may have; empty if the schema does not say. `root` is the schema that references are
    in, `depth` bounds how deep choices are."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or not depth:
        return frozenset()
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset({types})
    if isinstance(types, list):
        return frozenset(name for name in types if isinstance(name, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        values = [schema["const"]]
    if values:
        return frozenset(type_name(value) for value in values[:_MAX_VALUES])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list) and len(choices) <= _MAX_VALUES:
        # References may meet again and again; those of choices of choices are not followed.
        within = root if depth == _MAX_DEPTH and len(choices) <= _MAX_DEPTH else None
        kinds = [types_of(choice, within, depth - 1) for choice in choices]
        return frozenset().union(*kinds) if all(kinds) else frozenset()
    return frozenset()


def has_too_many_optional(schema: Mapping[str, Any]) -> bool:
    """True if an object has more than `MAX_OPTIONAL` properties that may be left out."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or len(properties) <= MAX_OPTIONAL:
        return False
    names = required if isinstance(required, list) else []
    num_required = len({name for name in names if isinstance(name, str)} & properties.keys())
    return len(properties) - num_required > MAX_OPTIONAL
