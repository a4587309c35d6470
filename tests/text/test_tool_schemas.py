# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from operations import assert_linear

from pagoda.errors import InvalidRequestError
from pagoda.text.grammars.tool_schemas import check_total, held_schema


def number(**keywords: Any) -> dict[str, Any]:
    properties = {"a": {"type": "number", **keywords}}
    return {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        ({"properties": {}}, True),
        ({"properties": {"a": {}}, "required": ["a"]}, True),
        ({"properties": {"a": {"properties": {}}}, "additionalProperties": {}}, False),
        ({"properties": {"a": {}}, "additionalProperties": True}, False),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, False),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, False),
        ({"type": "object"}, False),
        ({}, False),
    ],
)
def test_arguments_are_those_that_are_declared(schema: dict[str, Any], is_closed: bool) -> None:
    held = held_schema(schema, "f", is_strict=False)
    assert held == (schema | {"additionalProperties": False} if is_closed else schema)


@pytest.mark.parametrize("value", [5, 0.01, 2.5, 1000, 10_000_000])
def test_small_steps_are_held(value: float) -> None:
    schema = number(multipleOf=value)
    assert held_schema(schema, "f", is_strict=True) == schema


@pytest.mark.parametrize("value", [7919 * 7907, 62_000_000, 0.1234567, float("inf")])
def test_many_steps_are_too_much_for_an_automaton(value: float) -> None:
    schema = number(multipleOf=value, minimum=0)
    assert held_schema(schema, "f", is_strict=False) == number(minimum=0)
    with pytest.raises(InvalidRequestError, match="multipleOf") as caught:
        held_schema(schema, "f", is_strict=True)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("value", [True, "2", None])
def test_a_multiple_that_is_no_number_is_left_to_the_engine(value: object) -> None:
    schema = number(multipleOf=value)
    assert held_schema(schema, "f", is_strict=True) == schema


def test_steps_add_up() -> None:
    schema = {"allOf": [number(multipleOf=997), number(multipleOf=991)]}
    with pytest.raises(InvalidRequestError, match="multipleOf"):
        held_schema(schema, "f", is_strict=True)


@pytest.mark.parametrize("pattern", ["(?=a)b", "(?<!a)b", r"(a)\1", r"(?<n>a)\k<n>"])
def test_patterns_that_are_not_regular_are_passed_over_unless_strict(pattern: str) -> None:
    closed = {"type": "object", "additionalProperties": False}
    schema = {**closed, "properties": {"pattern": {"type": "string", "pattern": pattern}}}
    held = held_schema(schema, "f", is_strict=False)
    assert held == {**closed, "properties": {"pattern": {"type": "string"}}}
    assert held_schema(schema, "f", is_strict=True) == schema


def test_regular_patterns_and_values_stay() -> None:
    schema = {"anyOf": [{"pattern": r"(?<year>\d{4})"}, {"enum": ["(?=a)", {"multipleOf": 99991}]}]}
    assert held_schema(schema, "f", is_strict=False) == schema


def test_a_schema_has_a_largest_size() -> None:
    schema = number(enum=["x" * 100] * 2000)
    with pytest.raises(InvalidRequestError, match="bytes"):
        held_schema(schema, "f", is_strict=False)


def test_many_schemas_have_a_largest_size_together() -> None:
    schema = number(enum=["x" * 100] * 1000)
    check_total([schema, schema])
    with pytest.raises(InvalidRequestError, match="together"):
        check_total([schema] * 3)


def test_a_schema_has_a_greatest_depth() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    with pytest.raises(InvalidRequestError, match="deeply"):
        held_schema(schema, "f", is_strict=False)


def test_work_is_linear() -> None:
    def hold(size: int) -> Any:
        properties = {f"p{i}": {"type": "integer", "multipleOf": 2} for i in range(size)}
        return lambda: held_schema({"properties": properties}, "f", is_strict=False)

    assert_linear(hold, [100, 200, 400])
