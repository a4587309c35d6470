# SPDX-License-Identifier: Apache-2.0
"""The tools of a chat body, and which of them the answer may or must call."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.api.openai.bodies import ChatRequest
from pagoda.errors import refuse
from pagoda.text.answer_formats import AnswerFormats, ToolFormatName
from pagoda.text.grammars.tool_grammars import CallableTool, CallRules
from pagoda.text.grammars.tool_schemas import check_total, held_schema

Mode = Literal["none", "auto", "required", "named"]


_ID_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolSelection:
    """Tools of a body, and calls that an answer may make."""

    mode: Mode
    tools: Sequence[Mapping[str, Any]] = ()
    """All tools that the model is shown, in OpenAI's form; none where it must not call."""
    allowed: tuple[str, ...] | None = None
    """Names of the tools that may be called; None if all may."""
    is_single: bool = False
    """The answer ends behind its first call."""
    is_function: bool = False
    """The client speaks of functions, as OpenAI's API did before tools."""

    @property
    def calls_tools(self) -> bool:
        return self.mode != "none" and bool(self.tools)

    @property
    def must_call(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def finish_reason(self) -> str:
        """The reason for which an answer with calls ends. OpenAI says `stop` where the client named the tool."""
        if self.mode == "named":
            return "stop"
        return "function_call" if self.is_function else "tool_calls"

    def rules(self, *, is_held: bool = False) -> CallRules | None:
        """The calls that the engine holds the answer to; None if calls are free in an answer that is free, which
        it is unless `is_held`."""
        is_held = is_held or self.must_call or self.allowed is not None
        functions = [tool["function"] for tool in self.tools]
        if self.mode == "none" or not (is_held or any(f.get("strict") for f in functions)):
            return None
        allowed = [f for f in functions if self.allowed is None or f["name"] in self.allowed]
        tools = [self._callable(function) for function in allowed]
        check_total([tool.schema for tool in tools])
        return CallRules(tools, self.must_call, self.is_single)

    def _callable(self, function: Mapping[str, Any]) -> CallableTool:
        """A tool with its schema. In an answer that may call, only strict tools are held to theirs."""
        is_strict = bool(function.get("strict"))
        has_schema = is_strict or self.must_call
        schema = function.get("parameters") if has_schema else {"type": "object"}
        held = held_schema(schema or {}, function["name"], is_strict=is_strict)
        return CallableTool(function["name"], held, is_strict)

    def format_in(self, formats: AnswerFormats) -> ToolFormatName | None:
        """The format of the calls; None if there are none, or the model's is not known."""
        if not self.calls_tools:
            return None
        if formats.tools is None and self.must_call:
            return "bare_list"
        return formats.tools


def new_call_id(tool_format: ToolFormatName | None, name: str, index: int) -> str:
    """The id of call `index` of a conversation, as the model's template wants to see it again."""
    if tool_format == "mistral":  # nine characters, which its template checks
        return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))
    if tool_format == "kimi_k2":
        return f"functions.{name}:{index}"
    return f"call_{uuid.uuid4().hex[:24]}"


class _Name(msgspec.Struct, frozen=True):
    name: str


class _Named(msgspec.Struct, frozen=True, tag="function"):
    """`{"type": "function", "function": {"name": ...}}`."""

    function: _Name


class _AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[_Named]


class _Allowed(msgspec.Struct, frozen=True, tag="allowed_tools"):
    """`{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`."""

    allowed_tools: _AllowedTools


def served_tools(body: ChatRequest, ignored: Ignored) -> tuple[ChatRequest, dict[str, str]]:
    """The body without tools that another server would run, such as a search of the web, which are noted in
    `ignored`; and the client's names of the places of the others, for `renamed`."""
    tools: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for index, tool in enumerate(body.tools or ()):
        kind = tool.get("type", "function")
        if isinstance(kind, str) and kind != "function":
            ignored.note(f"tools.{kind}")
            continue
        names[f"tools[{len(tools)}]"] = f"tools[{index}]"
        tools.append(tool)
    if len(tools) == len(body.tools or ()):
        return body, {}
    return msgspec.structs.replace(body, tools=tools), names


def tool_choice_of(body: ChatRequest) -> ToolSelection:
    """The tools of a body, unchecked, and their choice. Raises InvalidRequestError: the choice is malformed."""
    if body.functions or body.function_call not in (None, "none", "auto"):
        return _functions_of(body)
    tools = body.tools or []
    choice = body.tool_choice
    is_single = body.parallel_tool_calls is False
    if choice == "any":  # Mistral's word
        choice = "required"
    if choice == "none":
        return ToolSelection("none")
    if choice in (None, "auto"):
        return ToolSelection("auto", tools, is_single=is_single)
    if choice == "required":
        if not tools:
            refuse("tool_choice", "is required, but there are no tools")
        return ToolSelection("required", tools, is_single=is_single)
    try:
        parsed = msgspec.convert(choice, _Named | _Allowed)
    except (msgspec.ValidationError, RecursionError):
        refuse(
            "tool_choice",
            "must be none, auto, required, or an object that names a function or has allowed_tools",
        )
    if isinstance(parsed, _Named):
        _check_names([parsed.function.name], tools, "tool_choice.function.name")
        return ToolSelection("named", tools, (parsed.function.name,), is_single=True)
    names = [tool.function.name for tool in parsed.allowed_tools.tools]
    where = "tool_choice.allowed_tools.tools"
    if not names:
        refuse(where, "must name at least one tool")
    _check_names(names, tools, where)
    mode = parsed.allowed_tools.mode
    return ToolSelection(mode, tools, tuple(dict.fromkeys(names)), is_single=is_single)


def _functions_of(body: ChatRequest) -> ToolSelection:
    """The choice of a client that speaks of functions: one call, of any function or of the one that it names."""
    if body.tools is not None or body.tool_choice is not None:
        refuse(
            "functions",
            "and function_call are older names of tools and tool_choice; use one of them",
        )
    tools = [{"type": "function", "function": function} for function in body.functions or ()]
    call = body.function_call
    if call == "none":
        return ToolSelection("none", is_function=True)
    if call in (None, "auto"):
        return ToolSelection("auto", tools, is_single=True, is_function=True)
    try:
        name = msgspec.convert(call, _Name).name
    except msgspec.ValidationError:
        refuse("function_call", "must be none, auto, or an object with the name of a function")
    _check_names([name], tools, "function_call.name")
    return ToolSelection("named", tools, (name,), is_single=True, is_function=True)


def _check_names(names: Sequence[str], tools: Sequence[Mapping[str, Any]], param: str) -> None:
    functions = [tool.get("function") for tool in tools]
    known = [function.get("name") for function in functions if isinstance(function, dict)]
    for name in names:
        if name not in known:
            refuse(param, f"must be one of the tools: Tool {name[:64]!r} not found in tools list")
