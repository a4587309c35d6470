# SPDX-License-Identifier: Apache-2.0
"""Conversations and tools in OpenAI's form: checks, and the form that chat templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from pagoda.concurrency.async_utils import LONG_TEXT_CHARS
from pagoda.errors import refuse
from pagoda.text.json_size import json_size
from pagoda.text.templates.chat_template import ChatTemplate

MAX_MESSAGES = 8192
MAX_PARTS = 1024
"""Text parts, or tool calls, in one message."""
MAX_ROLE_CHARS = 64
MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 32
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_SCHEMA_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_PATTERN_CHARS = 1024
_NO_NAME = re.compile(r"[<>|\[\]\x00-\x1f\x7f\x85\u2028\u2029]")
"""Signs of special tokens and of turns, which some templates would write into the prompt beside a role."""
_MAX_NAME_CHARS = 64
"""Characters of a property's name in an error."""
_MESSAGE_CHARS = 32
"""Counted for the role and the borders of a message, and for each of its parts and calls."""
_PAIR_CHARS = 1
"""Counted for each pair of messages and calls: a template that looks from each at all others takes as long."""
_ESCAPES = re.compile(r'(?:\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt]))+')
"""Escapes within strings of JSON, pairs of surrogates in one piece."""


class TextPart(msgspec.Struct, frozen=True):
    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    """One message. Unknown fields are ignored: clients send answers back as proxies have put them together."""

    role: Annotated[str, Meta(min_length=1, max_length=MAX_ROLE_CHARS)]
    """`system`, `developer`, `user`, `assistant`, `tool`, or one that the model's chat template knows."""
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_PARTS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name of `reasoning_content`, which is taken where both are given."""
    refusal: str | None = None
    """Text of an assistant that refused, in place of `content`."""
    audio: None = None
    function_call: FunctionCall | None = None
    """The only call, as OpenAI's API spelt it before it had tools."""


Messages = Annotated[list[Message], Meta(max_length=MAX_MESSAGES)]


class FunctionDefinition(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionDefinition


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """The prompt of a conversation; `options` are those of `ChatTemplate.render`.
    Raises InvalidRequestError: a message, a tool or an option is malformed."""
    check_tools(tools or ())
    return template.render(template_messages(messages), tools=tools, **options)


def texts_of(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    switches: Mapping[str, object] | None = None,
) -> Iterator[tuple[str, str]]:
    """The client's texts in a conversation, each with its name for errors. Parts of a content are one text, as
    templates join them."""
    for i, message in enumerate(messages):
        content = message.content or message.refusal or ""
        parts = [content] if isinstance(content, str) else [part.text for part in content]
        calls = [*(message.tool_calls or ())]
        calls += [] if message.function_call is None else [ToolCall(message.function_call)]
        yield f"messages[{i}].content", "".join(parts)
        yield f"messages[{i}].name", message.name or ""
        yield f"messages[{i}].tool_call_id", message.tool_call_id or ""
        yield f"messages[{i}].reasoning_content", message.reasoning_content or ""
        yield f"messages[{i}].reasoning", message.reasoning or ""
        for call in calls:
            arguments = call.function.arguments  # templates may show them without their escapes
            texts = (call.id or "", call.function.name, arguments, _unescaped(arguments))
            for text in dict.fromkeys(texts):
                yield f"messages[{i}].tool_calls", text
    for i, tool in enumerate(tools or ()):
        yield f"tools[{i}]", json.dumps(tool, ensure_ascii=False)
    for name, value in (switches or {}).items():
        yield "chat_template_kwargs", f"{name} {value}"


def _unescaped(text: str) -> str:
    """A text of JSON, whole or broken off, with what its escapes stand for."""
    plain = _ESCAPES.sub(lambda found: json.loads(f'"{found[0]}"'), text)
    return plain.encode(errors="replace").decode()


def text_size(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> int:
    """Characters of a text that takes as long as a template with a conversation, roughly: n messages and calls may
    be n² steps. What is beyond a long text is not counted."""
    size = json_size(tools, LONG_TEXT_CHARS) if tools else 0
    size += _PAIR_CHARS * len(messages) ** 2
    num_turns = 0
    for message in messages:
        if size > LONG_TEXT_CHARS:
            return size
        content = message.content or message.refusal or ""
        parts = [content] if isinstance(content, str) else [part.text for part in content]
        functions = [call.function for call in message.tool_calls or ()]
        size += sum(len(call.id or "") for call in message.tool_calls or ())
        if message.function_call is not None:
            functions.append(message.function_call)
        size += sum(map(len, parts)) + len(message.name or "") + len(message.tool_call_id or "")
        size += sum(len(function.name) + len(function.arguments) for function in functions)
        size += len(message.reasoning_content or "") + len(message.reasoning or "")
        size += _MESSAGE_CHARS * (1 + len(parts) + len(functions))
        num_turns += 1 + len(functions)
    return size + _PAIR_CHARS * (num_turns**2 - len(messages) ** 2)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as dicts, with their contents and the arguments of their calls as they came.
    Raises InvalidRequestError: a message lacks what its role needs, or has a name that no template can show."""
    if not messages:
        refuse("messages", "must hold at least one message")
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    if message.content is None and message.role != "assistant":
        refuse(f"{where}.content", "must be a string or a list of text parts")
    calls, where_calls = message.tool_calls or [], f"{where}.tool_calls"
    if message.function_call is not None:
        if calls:
            refuse(f"{where}.function_call", "is the older name of tool_calls, which is given too")
        calls, where_calls = [ToolCall(message.function_call)], f"{where}.function_call"
    if calls and message.role != "assistant":
        refuse(where_calls, "is only for the role assistant")
    if message.name is not None and _NO_NAME.search(message.name):
        refuse(f"{where}.name", "must be without line breaks and any of <, >, |, [ and ]")
    given = message.content or message.refusal or ""
    content: str | list[dict[str, str]] = (
        given if isinstance(given, str) else [msgspec.structs.asdict(part) for part in given]
    )
    role = "tool" if message.role == "function" else message.role
    turn: dict[str, Any] = {"role": role, "content": content}
    reasoning = (
        message.reasoning if message.reasoning_content is None else message.reasoning_content
    )
    fields = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        # The name in the template of gpt-oss, which takes no content beside it.
        "thinking": None if content else reasoning,
    }
    turn |= {name: value for name, value in fields.items() if value is not None}
    if calls:
        turn["tool_calls"] = [_template_call(call) for call in calls]
    return turn


def _template_call(call: ToolCall) -> dict[str, Any]:
    """A call with arguments as they came: what a model wrote must fit into the next turn, also if it broke off."""
    turn = {"type": "function", "function": msgspec.structs.asdict(call.function)}
    return turn if call.id is None else {"id": call.id, **turn}


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Checks tool definitions before they reach a template.
    Raises InvalidRequestError: there are too many, or one is malformed."""
    if len(tools) > MAX_TOOLS:
        refuse("tools", f"takes at most {MAX_TOOLS} tools, got {len(tools)}")
    names: set[str] = set()
    for i, raw in enumerate(tools):
        try:
            tool = msgspec.convert(raw, Tool)
        except (msgspec.ValidationError, RecursionError) as error:
            reason, _, path = str(error).partition(" - at `$")
            refuse(f"tools[{i}]{path.rstrip('`')}", f"is not a tool: {reason}")
        where = f"tools[{i}].function"
        if not _FUNCTION_NAME.fullmatch(tool.function.name):
            refuse(f"{where}.name", "must be 1 to 64 letters, digits, dots, dashes or underscores")
        if tool.function.name in names:
            refuse(f"{where}.name", f"is {tool.function.name!r}, as that of an earlier tool")
        names.add(tool.function.name)
        if tool.function.parameters is not None:
            _check_schema(tool.function.parameters, f"{where}.parameters")


def _check_schema(schema: object, *path: str, depth: int = 0) -> None:
    """Checks the form of a JSON schema as far as a template may rely on it; the work is linear in its size."""

    def refuse_at(rule: str, *field: str) -> NoReturn:
        where = ".".join(part[:_MAX_NAME_CHARS] for part in (*path, *field))
        refuse(where, f"{rule}: the tool has an invalid 'parameters' schema")

    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        refuse_at("must be a JSON schema, that is, an object")
    if depth > MAX_SCHEMA_DEPTH:
        refuse_at(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in _SCHEMA_TYPES:
            refuse_at(f"must be one of {', '.join(sorted(_SCHEMA_TYPES))}", "type")
    # Not compiled: that takes seconds for some patterns, and nothing here matches with them.
    pattern = schema.get("pattern", "")
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        rule = f"must be a regular expression of at most {MAX_PATTERN_CHARS} characters"
        refuse_at(rule, "pattern")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        refuse_at("must be an object", "properties")
    for name, child in properties.items():
        _check_schema(child, *path, "properties", name, depth=depth + 1)
    if "items" in schema:
        _check_schema(schema["items"], *path, "items", depth=depth + 1)
