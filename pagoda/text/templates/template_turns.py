# SPDX-License-Identifier: Apache-2.0
"""Messages in the form that a chat template wants, as its `TemplateTraits` say."""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from pagoda.text.answer_formats import ToolFormatName
from pagoda.text.templates.generic_tools import (
    SYSTEM_ROLES,
    show_tools,
    text_of,
    write_calls,
    write_results,
)
from pagoda.text.templates.template_traits import NO_CONTENT, SHORT_ID_CHARS, TemplateTraits

Turn = dict[str, Any]

_SHORT_ID = re.compile(rf"[A-Za-z0-9]{{{SHORT_ID_CHARS}}}")


def fitted_turns(
    turns: Sequence[Turn],
    traits: TemplateTraits,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_format: ToolFormatName | None = None,
) -> list[Turn]:
    """The turns of a conversation as the template takes them.

    Args:
        turns: Messages in OpenAI's form, with contents as texts or lists of text parts.
        tools: Tools in OpenAI's form; a template without tools gets them in a system message.
        tool_format: Format of the model's calls, for a template that does not show them.
    """
    is_generic = bool(tools) and traits.tools == "none"
    if any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns):
        turns = _with_calls(turns, traits, is_generic=is_generic, tool_format=tool_format)
    if traits.system == "first":
        turns = _one_system(turns)
    if tools and is_generic:
        turns = show_tools(turns, tools, has_system=traits.system != "none")
    elif tools and traits.tools == "in_system":
        turns = _tools_in_system(turns, tools)
    return [_with_content(turn, traits) for turn in turns]


def fitted_tools(
    tools: Sequence[Mapping[str, Any]], traits: TemplateTraits
) -> list[Mapping[str, Any]]:
    """The tools as the template takes them: some templates fail where a tool has no description or parameters."""
    if not traits.whole_tools:
        return list(tools)
    whole = {"description": "", "parameters": {"type": "object", "properties": {}}}
    # The fields of the client come first, in its order, which templates may write out.
    return [
        {**tool, "function": {**tool["function"], **whole, **tool["function"]}} for tool in tools
    ]


def _with_calls(
    turns: Sequence[Turn],
    traits: TemplateTraits,
    *,
    is_generic: bool,
    tool_format: ToolFormatName | None,
) -> list[Turn]:
    """The turns with their calls and results as the template shows them."""
    if is_generic or not traits.calls:
        has_none = is_generic or traits.tools == "none"
        turns = write_calls(turns, "hermes" if has_none else tool_format)
        if has_none or not traits.results:
            return write_results(turns)
    elif traits.call_ids != "any" or traits.needs_ids:
        turns = _with_ids(turns, traits)
    if not traits.parallel_calls:
        turns = _one_call_a_turn(turns)
    fitted: list[Turn] = []
    for turn in turns:
        if turn.get("tool_calls"):
            fitted += _call_turns(turn, traits)
        else:
            is_result = turn["role"] == "tool"
            fitted.append({**turn, "role": traits.result_role} if is_result else turn)
    return fitted


def _call_turns(turn: Turn, traits: TemplateTraits) -> list[Turn]:
    """A message with calls; its content may be one of its own."""
    calls = [_fitted_call(call, traits) for call in turn["tool_calls"]]
    turn = {**turn, "tool_calls": calls}
    content = turn.pop("content")
    empty = NO_CONTENT[traits.no_content]
    if not content:
        return [{**turn, **empty}]
    if traits.calls_beside_content:
        return [{**turn, "content": content}]
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return [{**rest, "content": content}, {"role": turn["role"], **empty, "tool_calls": calls}]


def _fitted_call(call: Turn, traits: TemplateTraits) -> Turn:
    given = call["function"]["arguments"]
    arguments: object = given
    if traits.arguments == "text":
        arguments = (
            (given or "{}") if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        )
    elif isinstance(given, str):
        arguments = _loaded(given or "{}")
        if not isinstance(arguments, dict):
            arguments = given if traits.broken_arguments else closed_object(given)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def closed_object(text: str) -> dict[str, Any]:
    """The JSON object that a text began when it broke off, without what is not whole at its end; if it began none,
    the text under the name `arguments`."""
    whole, cut = _closed(text)
    for candidate in (whole, _closed(text[:cut])[0]):
        value = _loaded(candidate)
        if isinstance(value, dict):
            return value
    return {"arguments": text}


def _loaded(text: str) -> object:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _closed(text: str) -> tuple[str, int]:
    """The text with what closes its strings, lists and objects, and the place behind its last whole item."""
    closers: list[str] = []
    cut, in_string, is_escaped = 0, False, False
    for place, character in enumerate(text):
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            closers.append("}" if character == "{" else "]")
            cut = place + 1
        elif character in "}]" and closers:
            closers.pop()
        elif character == ",":
            cut = place
    end = text[:-1] if is_escaped else text
    return end + '"' * in_string + "".join(reversed(closers)), cut


def _with_ids(turns: Sequence[Turn], traits: TemplateTraits) -> list[Turn]:
    """The turns with ids as the template wants them. Calls and results without ids are taken in their order."""
    ids: dict[str, str] = {}
    unanswered: deque[str] = deque()
    count = 0
    fitted = []
    for turn in turns:
        if turn.get("tool_calls"):
            calls = []
            for call in turn["tool_calls"]:
                given = call.get("id") or f"call_{count}"
                ids[given] = new = _fitted_id(given, call["function"]["name"], count, traits)
                unanswered.append(new)
                calls.append({**call, "id": new})
                count += 1
            turn = {**turn, "tool_calls": calls}
        elif turn["role"] == "tool":
            first = unanswered.popleft() if unanswered else f"call_{count}"
            given = turn.get("tool_call_id")
            fitting = (
                ids.get(given) or _fitted_id(given, "unknown", count, traits) if given else first
            )
            turn = {**turn, "tool_call_id": fitting}
        fitted.append(turn)
    return fitted


def _fitted_id(call_id: str, name: str, count: int, traits: TemplateTraits) -> str:
    if traits.call_ids == "named":
        return call_id if call_id.startswith(f"functions.{name}:") else f"functions.{name}:{count}"
    if traits.call_ids == "any" or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:SHORT_ID_CHARS]


def _one_call_a_turn(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with one call each, and its result behind it."""
    fitted: list[Turn] = []
    rest = deque(turns)
    while rest:
        turn = rest.popleft()
        calls = turn.get("tool_calls") or []
        if len(calls) < 2:
            fitted.append(turn)
            continue
        results: list[Turn] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        # A result without an id is that of the call in its place. Several calls may have one id.
        left: dict[object, deque[Turn]] = {}
        for index, result in enumerate(results):
            left.setdefault(result.get("tool_call_id") or index, deque()).append(result)
        for index, call in enumerate(calls):
            fitted.append({**turn, "tool_calls": [call]})
            turn = {"role": turn["role"], "content": ""}
            answers = left.get(call.get("id")) or left.get(index)
            fitted += [answers.popleft()] if answers else []
        fitted += chain.from_iterable(left.values())
    return fitted


def _one_system(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with all system messages in the first one."""
    system = [turn for turn in turns if turn["role"] in SYSTEM_ROLES]
    if not system or system == [turns[0]]:
        return list(turns)
    content = "\n\n".join(text_of(turn["content"]) for turn in system)
    others = [turn for turn in turns if turn["role"] not in SYSTEM_ROLES]
    return [{**system[0], "content": content}, *others]


def _tools_in_system(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The turns with the functions, as JSON, in a field of the system message."""
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    has_system = bool(turns) and turns[0]["role"] == "system"
    system = turns[0] if has_system else {"role": "system", "content": ""}
    return [{**system, "tools": text}, *(turns[1:] if has_system else turns)]


def _with_content(turn: Turn, traits: TemplateTraits) -> Turn:
    """The turn with its content as a text or as parts."""
    content = turn.get("content")
    if content is None:
        return turn
    role = "tool" if turn["role"] == traits.result_role else turn["role"]
    role = "system" if role == "developer" else role
    if role in traits.one_part:
        return {**turn, "content": [{"type": "text", "text": text_of(content)}]}
    if isinstance(content, list) and role not in traits.parts:
        return {**turn, "content": text_of(content)}
    return turn
