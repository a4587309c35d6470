# SPDX-License-Identifier: Apache-2.0
"""Edits of a conversation that its client asks for in `context_management`: served where there is nothing to edit.

Clients send them with every request, so that a server clears old results and thoughts of a conversation that has
become too long. https://platform.claude.com/docs/en/build-with-claude/context-editing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.errors import refuse
from pagoda.text.json_size import json_size

_TRIGGERS = {"clear_tool_uses": 100_000, "compact": 150_000}
"""Tokens of a prompt above which an edit takes place, unless it says otherwise."""
_KEPT_TOOL_USES = 3
_KEPT_THINKING_TURNS = 1


def check_edits(
    edits: Sequence[object],
    place: str,
    messages: Sequence[Mapping[str, Any]],
    tools: object = None,
) -> None:
    """Raises InvalidRequestError: an edit at `place` of a body would change its `messages`, which are in the form
    of chat completions, or is malformed."""
    for index, edit in enumerate(edits):
        where = f"{place}[{index}]"
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(edit, dict) or not isinstance(kind, str):
            refuse(f"{where}.type", "must be the name of an edit")
        if not _changes_nothing(edit, kind, messages, tools):
            rule = (
                f"{kind[:64]!r} would change this conversation, which is not served; leave it out"
            )
            refuse(f"{where}.type", rule, "not_supported")


def _changes_nothing(
    edit: Mapping[str, Any], kind: str, messages: Sequence[Mapping[str, Any]], tools: object
) -> bool:
    kept = edit.get("keep")
    if kind.startswith("clear_thinking"):
        num_thoughts = sum("reasoning_content" in message for message in messages)
        return kept == "all" or num_thoughts <= _value(kept, _KEPT_THINKING_TURNS)
    name = next((name for name in _TRIGGERS if kind.startswith(name)), None)
    if kind == "compaction":  # of the Responses API
        trigger: object = {"type": "input_tokens", "value": edit.get("compact_threshold")}
        name = "compact"
    else:
        trigger = edit.get("trigger")
    if name is None:
        return False
    num_uses = sum(len(message.get("tool_calls") or ()) for message in messages)
    if name == "clear_tool_uses" and num_uses <= _value(kept, _KEPT_TOOL_USES):
        return True
    limit = _value(trigger, _TRIGGERS[name])
    if isinstance(trigger, dict) and trigger.get("type") == "tool_uses":
        return num_uses <= limit
    # A token has at least a character, of what the template adds for messages and tools, too.
    return json_size([messages, tools], limit) <= limit


def _value(given: object, default: int) -> int:
    value = given.get("value") if isinstance(given, dict) else given
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**31:
        return default
    return int(value)
