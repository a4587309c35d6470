# SPDX-License-Identifier: Apache-2.0
"""Tools, calls and results as plain messages, for chat templates that do not show them.

The form is that of Hermes (https://github.com/NousResearch/Hermes-Function-Calling), which most models have seen.
Where a template shows tools but no calls, calls are written as the model writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pagoda.text.answer_formats import ToolFormatName

Turn = dict[str, Any]

_PROMPT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
SYSTEM_ROLES = frozenset({"system", "developer"})
_HIDDEN = frozenset({"tool_calls", "tool_call_id", "name"})


def text_of(content: object) -> str:
    """The content of a message as one text."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return str(content or "")


def show_tools(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], *, has_system: bool
) -> list[Turn]:
    """The turns with a prompt that describes tools: in the system message; if the template shows none, before the
    user's first message, with what the system says."""
    prompt = _PROMPT.format(tools="\n".join(map(_json, tools)))
    said = [text_of(turn["content"]) for turn in turns if turn["role"] in SYSTEM_ROLES]
    turns = [turn for turn in turns if turn["role"] not in SYSTEM_ROLES]
    texts = [*said, prompt]
    if not has_system and turns and turns[0]["role"] == "user":
        texts.append(text_of(turns[0]["content"]))
        turns = turns[1:]
    role = "system" if has_system else "user"
    return [{"role": role, "content": "\n\n".join(filter(None, texts))}, *turns]


def write_calls(turns: Sequence[Turn], tool_format: ToolFormatName | None) -> list[Turn]:
    """The turns with their calls in their contents."""
    write = _WRITERS.get(tool_format or "hermes", _hermes)
    return [_with_text(turn, write) if turn.get("tool_calls") else turn for turn in turns]


def write_results(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with results of calls in messages of the user: those of one answer are in one message, with what
    the user says to them."""
    written: list[Turn] = []
    results: list[str] = []
    for turn in turns:
        if turn["role"] == "tool":
            results.append(f"<tool_response>\n{text_of(turn['content'])}\n</tool_response>")
            continue
        if results and turn["role"] == "user":
            turn = {**turn, "content": "\n".join([*results, text_of(turn["content"])])}
        elif results:
            written.append({"role": "user", "content": "\n".join(results)})
        results.clear()
        written.append(turn)
    return [*written, {"role": "user", "content": "\n".join(results)}] if results else written


def _with_text(turn: Turn, write: Callable[[Sequence[Turn]], str]) -> Turn:
    kept = {name: value for name, value in turn.items() if name not in _HIDDEN}
    texts = (text_of(turn["content"]), write(turn["tool_calls"]))
    return {**kept, "content": "\n".join(filter(None, texts))}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(call: Turn) -> str:
    """A call as JSON. Its arguments are as the model wrote them, broken off or not."""
    function = call["function"]
    return f'{{"name": {_json(function["name"])}, "arguments": {_arguments(function)}}}'


def _arguments(function: Turn) -> str:
    given = function["arguments"]
    return (given or "{}") if isinstance(given, str) else _json(given)


def _hermes(calls: Sequence[Turn]) -> str:
    return "\n".join(f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls)


def _granite(calls: Sequence[Turn]) -> str:
    return f"<|tool_call|>[{', '.join(map(_call, calls))}]"


def _phi4(calls: Sequence[Turn]) -> str:
    return f"<|tool_call|>[{', '.join(map(_call, calls))}]<|/tool_call|>"


def _kimi(calls: Sequence[Turn]) -> str:
    def spelled(call: Turn, index: int) -> str:
        function, call_id = call["function"], str(call.get("id"))
        if not call_id.startswith(f"functions.{function['name']}:"):
            call_id = f"functions.{function['name']}:{index}"
        return (
            f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{_arguments(function)}"
            "<|tool_call_end|>"
        )

    texts = [spelled(call, index) for index, call in enumerate(calls)]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


_WRITERS: Mapping[ToolFormatName, Callable[[Sequence[Turn]], str]] = MappingProxyType(
    {"hermes": _hermes, "granite": _granite, "phi4_mini_json": _phi4, "kimi_k2": _kimi}
)
