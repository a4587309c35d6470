# SPDX-License-Identifier: Apache-2.0
"""Constraints of answers that explode, and bodies of many values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.chaos.hostile.attack import BODY_BYTES, MESSAGES, Attack, chat, completion


def constraints() -> Iterator[Attack]:
    """Schemas that explode, slow patterns and grammars, tools of one name, and bodies of many values."""
    for name, schema in _schemas():
        yield chat(f"schema: {name}", response_format=_response_format(schema))
        tool = {"name": "f", "strict": True, "parameters": schema}
        tools = [{"type": "function", "function": tool}]
        yield chat(f"tool: {name}", tools=tools, tool_choice="required")
        if "patterns" in name:
            body = json.dumps({"messages": MESSAGES, "tools": tools}).encode()
            yield Attack(f"/tokenize, tool: {name}", "/tokenize", body)
    for name, pattern in _PATTERNS.items():
        yield completion(f"regex: {name}", structured_outputs={"regex": pattern})
    for name, grammar in _GRAMMARS.items():
        yield completion(f"grammar: {name}", structured_outputs={"grammar": grammar})
    choices = [f"{i:025d}" for i in range(4000)]
    yield completion("4,000 choices", structured_outputs={"choice": choices})
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    yield chat("tools of one name", tools=[tool, tool], tool_choice="required")
    for part in ("[]", "{}", '""', '{"a":1}', '"x"', "1"):
        number = min(BODY_BYTES // (len(part) + 1), 3_000_000)
        yield _large(f"{number:,} times {part}", ",".join([part] * number))
    names = ",".join(f'"{i}":1' for i in range(600_000))
    yield _large("600,000 names", "{" + names + "}")
    yield _large("8 MB of quotes", '"' + '\\"' * (BODY_BYTES // 2) + '"')
    yield completion("8 MB of text", prompt="a " * (BODY_BYTES // 2))


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _schemas() -> Iterator[tuple[str, Any]]:
    text = {"type": "string"}
    links = {f"a{i}": _object(**dict.fromkeys("xy", _ref(i + 1))) for i in range(200)}
    yield "definitions in a chain", {**_ref(0), "$defs": links | {"a200": text}}
    yield "itself", {"$ref": "#"}
    yield "a million values", {"enum": list(range(1_000_000))}
    yield "9,000 values", _object(a={"enum": [f"v{i}" for i in range(9000)]})
    yield "a long constant", _object(a={"enum": ["x" * 100_000, "y"]})
    yield "2,000 optional", {"type": "object", "properties": {f"p{i}": text for i in range(2000)}}
    yield "300 optional", {"type": "object", "properties": {f"p{i}": text for i in range(300)}}
    yield (
        "bounds of 500 numbers",
        _object(
            **{
                f"k{i}": {"type": "number", "minimum": i - 1.5, "maximum": i + 9.25}
                for i in range(500)
            }
        ),
    )
    yield "long names", _object(**{f"{i}".rjust(200_000, "x"): text for i in range(18)})
    parts = [{"anyOf": [_object(**{f"p{i}_{j}": text}) for j in range(6)]} for i in range(8)]
    yield "choices multiplied", {"allOf": parts}
    yield (
        "1,000 patterns",
        _object(
            **{f"k{i}": {**text, "pattern": f"^[a-z]{{1,50}}{i}.*(x|y)+z$"} for i in range(1000)}
        ),
    )
    yield (
        "wide patterns",
        _object(
            **{
                f"k{i}": {**text, "pattern": "(?i)^[\\p{L}\\u0100-\\uffff]{1,200}$"}
                for i in range(8)
            }
        ),
    )


_PATTERNS = {
    "catastrophic": "(a+)+b",
    "repeated a billion times": "(x|y)a{1000000000}",
    "squared": "(.{1,1000}){1,1000}",
    "exponential": "(a|b)*a(a|b){300}",
    "all of twenty": "&".join(["(.*a.{30})"] * 20),
    "nested": "(" * 6000 + ")" * 6000,
    "open": "(",
}
_GRAMMARS = {
    "ambiguous": 'start: s\ns: s s | "a" | ""',
    "ambiguous in three": 'start: x\nx: x x x | "a"',
    "repeated twice": 'start: ("a"{1,100000}){1,100000}',
    "itself": "start: start",
    "a chain": "start: r0\n"
    + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(2000))
    + '\nr2000: "a"',
    "an error": 'start: "a\nb:',
}


def _ref(index: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/a{index}"}


def _response_format(schema: Any) -> dict[str, Any]:
    inner = {"name": "x", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": inner}


def _large(name: str, values: str) -> Attack:
    body = chat(name, response_format=_response_format({"enum": ["HERE"]})).body
    return Attack(name, "/v1/chat/completions", body.replace(b'"HERE"', values.encode()))
