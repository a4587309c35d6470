# SPDX-License-Identifier: Apache-2.0
"""Questions, tools and schemas that all clients are tried with."""

from __future__ import annotations

from typing import Any

QUESTION = "What is 17 + 25?"
ANSWER = "42"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["town", "city"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
