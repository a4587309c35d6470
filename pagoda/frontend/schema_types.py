"""The types of values by their JSON schema."""

from __future__ import annotations

_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_MAX_DEPTH = 8
"""Levels of `anyOf` that are looked into."""


def type_name(value: object) -> str:
    """The name of a JSON value's type; empty for other values."""
    return _TYPES.get(type(value), "")


def types_of(schema: object, depth: int = _MAX_DEPTH) -> frozenset[str]:
    """The types that a value may have; empty if the schema does not say. `depth` bounds how deep choices are."""
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
        return frozenset(type_name(value) for value in values)
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list):
        kinds = [types_of(choice, depth - 1) for choice in choices]
        return frozenset().union(*kinds) if all(kinds) else frozenset()
    return frozenset()
