# SPDX-License-Identifier: Apache-2.0
"""Streams of answers that are held to a schema, a regular expression or the parameters of a tool."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
from streams import Answer, bodies

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{12,30}$"},
        "entries": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue", 17, None]},
            "minItems": 24,
            "maxItems": 40,
        },
        "count": {"type": "integer", "minimum": 1000, "maximum": 999_999},
    },
    "required": ["name", "entries", "count"],
    "additionalProperties": False,
}
PATTERN = r"([a-z]{2,9} ){20,30}\d{4}"
TOOL = "note"
_FUNCTION = {"name": TOOL, "parameters": SCHEMA}
KINDS: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA},
        }
    },
    "regex": {"structured_outputs": {"regex": PATTERN}},
    "tool": {
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}
"""Fields that constrain an answer, by the kind of the constraint."""


def constrained_bodies(max_tokens: int = 400, **fields: Any) -> list[dict[str, Any]]:
    """Returns requests of each kind, greedy and sampled from a seed, for one answer and for two.

    `fields` are those of `bodies`.
    """
    kinds = [{**fields, "n": n} for n in (1, 2) for fields in KINDS.values() for _ in range(2)]
    plain = bodies(len(kinds), max_tokens, **fields)
    common = {"ignore_eos": False, "return_token_ids": True, "thinking_token_budget": 30}
    return [{**body, **kind, **common} for body, kind in zip(plain, kinds, strict=True)]


def check_answers(answers: list[Answer]) -> None:
    """Raises AssertionError unless every answer to `constrained_bodies` is complete and fits its constraint."""
    kinds = [kind for n in (1, 2) for kind in KINDS for _ in range(2 * n)]
    for kind, answer in zip(kinds, answers, strict=True):
        assert answer.token_ids
        if kind == "regex":
            assert answer.reason == "stop"
            assert re.fullmatch(PATTERN, answer.text), answer.text
            continue
        assert answer.reason == ("tool_calls" if kind == "tool" else "stop")
        jsonschema.validate(json.loads(answer.text.removeprefix(TOOL)), SCHEMA)
