# SPDX-License-Identifier: Apache-2.0
"""Checks of answers, exact in every case.

`{"text": ...}`       the answer, after a leading <think>...</think> and white space, equals it;
`{"json": ...}`       the answer parses as JSON to exactly this value;
`{"tool_call": ...}`  the answer is one tool call with this name and these arguments.
"""

from __future__ import annotations

import json
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def final_text(answer: str) -> str:
    """Return the answer without its reasoning."""
    return answer.rsplit("</think>", 1)[-1].strip()


def parse_tool_call(answer: str) -> dict[str, Any] | None:
    """Return the one tool call an answer consists of, None for anything else."""
    text = final_text(answer)
    if not (text.startswith(OPEN) and text.endswith(CLOSE)):
        return None
    try:
        call = json.loads(text[len(OPEN) : -len(CLOSE)])
    except ValueError:
        return None
    return call if isinstance(call, dict) else None


def passes(expect: dict[str, Any], answer: str) -> bool:
    """Say whether an answer (the text before <|im_end|>) is right."""
    if "text" in expect:
        return final_text(answer) == str(expect["text"])
    if "json" in expect:
        try:
            return bool(json.loads(final_text(answer)) == expect["json"])
        except ValueError:
            return False
    if "tool_call" in expect:
        return bool(parse_tool_call(answer) == expect["tool_call"])
    raise ValueError(f"unknown kind of check: {sorted(expect)}")
