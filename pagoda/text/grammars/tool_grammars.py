# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers with tool calls: one for each format, composed as text for the engine.

An answer that must call is held to the format from its beginning, or from the end of its reasoning. In an answer
that may call, a call is held to it from its opening tag on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pagoda.errors import refuse
from pagoda.messages.frontend import Grammar
from pagoda.text.answer_formats import HARMONY, AnswerFormats, ToolFormatName
from pagoda.text.grammars.lark import GAP, TEXT, LarkWriter
from pagoda.text.grammars.schema_types import resolved, types_of
from pagoda.text.reasoning_border import ReasoningBorder

_STRING_KEYWORDS = ("pattern", "format", "minLength", "maxLength", "contentEncoding")
"""Keywords of strings that cannot be held where strings have no quotes."""
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class CallableTool:
    """A tool that an answer may call."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of the arguments."""
    is_strict: bool
    """Keywords of the schema that cannot be held are refused; else they are passed over."""


@dataclass(frozen=True)
class CallRules:
    """Calls that an answer may have."""

    tools: Sequence[CallableTool]
    must_call: bool
    is_single: bool


_Arguments = Callable[[LarkWriter, CallableTool], str]


@dataclass(frozen=True)
class _Style:
    """The text of calls in one format. `{name}` stands for the name of a tool, `{arguments}` for its arguments."""

    call: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    opening: str = ""
    """The tag at which a call in free text begins; without one, calls are at the beginning of an answer."""


def _json_arguments(writer: LarkWriter, tool: CallableTool) -> str:
    schema = dict(tool.schema)
    schema.setdefault("type", "object")
    return writer.json(schema, is_strict=tool.is_strict)


class _TaggedArguments:
    """Arguments between tags; strings have no quotes."""

    def __init__(self, before: str, between: str, after: str, unheld: str) -> None:
        """`unheld` is a regular expression of what ends a value, too."""
        self._before, self._between, self._after = before, between, after
        self._unheld = unheld

    def __call__(self, writer: LarkWriter, tool: CallableTool) -> str:
        properties, required = _properties(tool)
        if not properties:
            # Without properties in the schema, arguments are free.
            free = f"{writer.until(self._between)} {writer.until(self._after)}"
            is_empty = tool.schema.get("additionalProperties") is False or not tool.schema
            return '""' if is_empty else f"({writer.literal(self._before)} {free})*"
        text = writer.text_without(self._unheld)
        parts = []
        for name, schema in properties.items():
            head = writer.literal(f"{self._before}{name}{self._between}")
            part = f"{head} {self._value(writer, tool, name, schema, text)}"
            parts.append(part if name in required else f"({part})?")
        return writer.rule(" ".join(parts))

    def _value(
        self, writer: LarkWriter, tool: CallableTool, name: str, schema: Any, text: str
    ) -> str:
        """The value of an argument and the tag behind it; `text` is a terminal for free strings."""
        found = resolved(schema, tool.schema)
        if not isinstance(found, dict) or "string" not in types_of(found, tool.schema):
            value = _json_part(writer, tool, schema)
            return f"{value} {writer.literal(self._after)}"
        values = [found["const"]] if "const" in found else found.get("enum")
        if isinstance(values, list) and values:
            texts = [v if isinstance(v, str) else json.dumps(v) for v in values]
            choices = " | ".join(writer.literal(text) for text in texts)
            return f"({choices}) {writer.literal(self._after)}"
        unheld = next((key for key in _STRING_KEYWORDS if key in found), None)
        if tool.is_strict and unheld is not None:
            refuse(
                "tools",
                f"has the keyword {unheld} for argument {name[:64]!r} of the strict tool {tool.name!r}, which "
                "the format of this model's calls cannot hold",
            )
        return writer.until(self._after, text=text)


def _python_arguments(writer: LarkWriter, tool: CallableTool) -> str:
    """Keyword arguments of Python with JSON values, in the order of the schema; free without properties."""
    properties, required = _properties(tool)
    if not properties and tool.schema and tool.schema.get("additionalProperties") is not False:
        item = f"{writer.terminal('/[A-Za-z_][A-Za-z0-9_]*=/')} {_json_part(writer, tool, {})}"
        return writer.rule(f'({item} (", " {item})*)?')
    rest, first = '""', '""'
    for name, schema in reversed(list(properties.items())):
        item = f"{writer.literal(f'{name}=')} {_json_part(writer, tool, schema)}"
        is_required = name in required
        begins = f"({item} {rest})" if is_required else f"({item} {rest} | {first})"
        follows = f'(", " {item} {rest})' if is_required else f'(", " {item} {rest} | {rest})'
        first, rest = writer.rule(begins), writer.rule(follows)
    return first


_OBJECT = '{{"name": {quoted}, "arguments": {arguments}}}'
_PARAMETERS = '{{"name": {quoted}, "parameters": {arguments}}}'
_STYLES: Mapping[str, _Style] = MappingProxyType(
    {
        "hermes": _Style(
            f"<tool_call>\n{_OBJECT}\n</tool_call>", separator="\n", opening="<tool_call>"
        ),
        "qwen3_coder": _Style(
            "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
            separator="\n",
            opening="<tool_call>",
        ),
        "glm45": _Style(
            "<tool_call>{name}\n{arguments}</tool_call>", separator="\n", opening="<tool_call>"
        ),
        "llama3_json": _Style(_PARAMETERS, separator="; "),
        "pythonic": _Style("{name}({arguments})", begin="[", separator=", ", end="]"),
        "mistral": _Style("[TOOL_CALLS]{name}[ARGS]{arguments}", opening="[TOOL_CALLS]"),
        "mistral_list": _Style(
            _OBJECT, begin="[TOOL_CALLS][", separator=", ", end="]", opening="[TOOL_CALLS]"
        ),
        "deepseek_v3": _Style(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            separator="\n",
            end="<｜tool▁calls▁end｜>",
            opening="<｜tool▁calls▁begin｜>",
        ),
        "deepseek_v31": _Style(
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
            opening="<｜tool▁calls▁begin｜>",
        ),
        "kimi_k2": _Style(
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
            opening="<|tool_calls_section_begin|>",
        ),
        "granite": _Style(
            _OBJECT, begin="<|tool_call|>[", separator=", ", end="]", opening="<|tool_call|>"
        ),
        "granite_text": _Style(
            _OBJECT, begin="<tool_call>[", separator=", ", end="]", opening="<tool_call>"
        ),
        "phi4_mini_json": _Style(
            _OBJECT, begin="functools[", separator=", ", end="]", opening="functools["
        ),
        "bare_list": _Style(_PARAMETERS, begin="[", separator=", ", end="]"),
        "openai": _Style(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
        ),
    }
)
_ARGUMENTS: Mapping[str, _Arguments] = MappingProxyType(
    {
        "qwen3_coder": _TaggedArguments(
            *("<parameter=", ">\n", "\n</parameter>\n"),
            r"</parameter>\s*(<parameter=|</?function|</?tool_call>)|<parameter=[^<>]*>"
            r"|</function>\s*(</tool_call>|<tool_call>|<function=)|</tool_call>\s*<tool_call>",
        ),
        "glm45": _TaggedArguments(
            *("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            r"</arg_value>\s*(<arg_key>|</?tool_call>)|<arg_key>[^<]*</arg_key>"
            r"|</tool_call>\s*<tool_call>",
        ),
        "pythonic": _python_arguments,
    }
)
_BARE_CALL = r"[ \t\r\n]*(\[\s*[A-Za-z0-9_.\-]+\(|(\[\s*)?\{\s*\"(name|function|type|arguments|parameters)\")"
"""Beginning of a line with which a model calls without a tag."""
_FIELD = re.compile(r"(\{arguments\}|\{index\})")


def answer_grammar(
    added_token_id: Callable[[str], int | None],
    formats: AnswerFormats,
    *,
    calls: CallRules | None,
    tool_format: ToolFormatName | None,
    reasoning: ReasoningBorder | None,
    budget: int | None = None,
    content: Grammar | None = None,
) -> Grammar:
    """The grammar of an answer that has these calls, or `content`, by default free text, behind reasoning
    of at most `budget` tokens; the tag behind it must be a token then.
    Raises InvalidRequestError: a strict tool cannot be held to its schema in this format, or reasoning to its
    budget."""
    writer = LarkWriter(added_token_id, formats.tokens(calls_tools=True))
    if reasoning is not None and budget is not None:
        end = reasoning.style.end[0]
        if not writer.is_token(end):
            rule = f"needs a model with a token for the end of its reasoning; {end!r} is none here"
            refuse("thinking_token_budget", rule, "not_supported")
    if tool_format == "openai" or (reasoning is not None and reasoning.style is HARMONY):
        return Grammar("lark", writer.grammar(_harmony(writer, calls, budget, content)))
    begin = "" if reasoning is None else _reasoning(writer, reasoning, budget)
    if calls is None or tool_format is None:
        text = TEXT if content is None else writer.content(content)
        return Grammar("lark", writer.grammar(f"{begin} {text}"))
    style = _STYLES[_variant(writer, tool_format)]
    if calls.must_call:
        return Grammar(
            "lark", writer.grammar(f"{begin} {_section(writer, style, calls, tool_format)}")
        )
    if content is not None:
        section = _section(writer, style, calls, tool_format)
        either = f"({section} | {writer.content(content)})"
        return Grammar("lark", writer.grammar(f"{begin} {either}"))
    return Grammar("lark", writer.grammar(f"{begin} {_lazy(writer, style, calls, tool_format)}"))


def _variant(writer: LarkWriter, tool_format: ToolFormatName) -> str:
    """The style of a format whose models differ, by the tokens that this one has."""
    if tool_format == "mistral" and not writer.is_token("[ARGS]"):
        return "mistral_list"
    if tool_format == "granite" and not writer.is_token("<|tool_call|>"):
        return "granite_text"
    return tool_format


def _section(
    writer: LarkWriter,
    style: _Style,
    calls: CallRules,
    tool_format: ToolFormatName,
    *,
    opener: str = "",
) -> str:
    """An expression for the calls; `opener` is one that takes the place of the opening tag."""
    # In one piece: the beginning of a list alone may begin free text, too.
    first = style.begin.replace("{", "{{") + style.call
    if opener:
        first = first.removeprefix(style.opening)
    head = f"{opener} {_call(writer, first, calls, tool_format)}"
    if not calls.is_single and (style.begin or not opener):
        again = _call(writer, style.call, calls, tool_format)
        head += f" ({writer.literal(style.separator)} {again})*"
    return f"{head} {writer.literal(style.end)}"


def _lazy(writer: LarkWriter, style: _Style, calls: CallRules, tool_format: ToolFormatName) -> str:
    """An expression for free text in which calls have their form from the opening tag on."""
    if not style.opening:
        plain = writer.text_without(_BARE_CALL, at_lines=True)
        return f"({_section(writer, style, calls, tool_format)} | {plain})"
    opener = writer.until(style.opening)
    section = _section(writer, style, calls, tool_format, opener=opener)
    return f"({section} | {TEXT})" if calls.is_single else f"({section})* {TEXT}"


def _call(writer: LarkWriter, text: str, calls: CallRules, tool_format: ToolFormatName) -> str:
    """A rule for a call of any of the tools, spelt as `text`."""
    arguments = _ARGUMENTS.get(tool_format, _json_arguments)
    choices = []
    for tool in calls.tools:
        spelt = []
        for part in _FIELD.split(text):
            if part == "{arguments}":
                spelt.append(arguments(writer, tool))
            elif part == "{index}":
                spelt.append(writer.terminal("/[0-9]{1,3}/"))
            else:
                part = part.replace("{quoted}", json.dumps(tool.name)).replace("{name}", tool.name)
                spelt.append(writer.literal(part.replace("{{", "{").replace("}}", "}")))
        choices.append(writer.rule(" ".join(filter(None, spelt))))
    return writer.rule(" | ".join(choices))


def _reasoning(writer: LarkWriter, reasoning: ReasoningBorder, budget: int | None) -> str:
    """An expression for the reasoning and a little white space behind it."""
    style = reasoning.style
    opening = " | ".join(map(writer.literal, style.begin))
    body = writer.until(*style.end, max_tokens=budget)
    if not reasoning.is_open:
        return f"(({opening}) {body} {GAP})?"
    again = f"({opening})? " if writer.is_token(style.begin[0]) else ""
    return f"{again}{body} {GAP}"


def _harmony(
    writer: LarkWriter,
    calls: CallRules | None,
    budget: int | None,
    content: Grammar | None,
) -> str:
    """An expression for messages: reasoning, then a call or the final one. A preamble may come before, but for a
    final message that is held to `content`: a preamble would be content too."""
    ending = "<|end|><|start|>assistant"
    analysis = writer.literal("<|channel|>analysis<|message|>")
    preamble = writer.literal("<|channel|>commentary<|message|>")
    said = f"({preamble} {writer.until(ending)})?"
    final = writer.literal("<|channel|>final<|message|>")
    held = None if content is None else writer.content(content)
    last = f"{said} {final} {TEXT}" if held is None else f"{final} {held}"
    if calls is not None:
        call = f"{said} {_call(writer, _STYLES['openai'].call, calls, 'openai')}"
        last = call if calls.must_call else f"({call} | {last})"
    return f"({analysis} {writer.until(ending, max_tokens=budget)})? {last}"


def _properties(tool: CallableTool) -> tuple[Mapping[str, Any], Sequence[str]]:
    """The arguments by name with their schemas, and the names of those that must be given."""
    properties, required = tool.schema.get("properties"), tool.schema.get("required")
    return (
        properties if isinstance(properties, dict) else {},
        required if isinstance(required, list) else [],
    )


def _json_part(writer: LarkWriter, tool: CallableTool, schema: Any) -> str:
    """A rule for the JSON value of one argument; references reach the definitions of the whole schema."""
    part = dict(schema) if isinstance(schema, dict) else {}
    for name in _DEFINITIONS:
        if name in tool.schema:
            part.setdefault(name, tool.schema[name])
    return writer.json(part, is_strict=tool.is_strict)
