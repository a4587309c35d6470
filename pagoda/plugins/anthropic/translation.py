# SPDX-License-Identifier: Apache-2.0
"""Translation of a body of the Messages API: blocks become messages, and errors keep the client's names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pagoda.api.bodies.body import content_of, convert_body, text_in, text_or_parts
from pagoda.api.bodies.context_management import check_edits
from pagoda.api.bodies.fields import GenerationFields, renamed
from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.api.openai.bodies import ChatRequest
from pagoda.errors import refuse
from pagoda.plugins.anthropic.bodies import (
    Block,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    ToolChoice,
)

_OWN_FIELDS = frozenset(
    {"stream", "stream_options", "metadata", "service_tier", "stop", "n", "best_of", "max_tokens"}
)
"""Fields that chat completions have with another meaning, or need not know."""
_SHARED_FIELDS = (
    *("chat_template_kwargs",),
    *(name for name in GenerationFields.__struct_fields__ if name not in _OWN_FIELDS),
)
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function": "tool_choice",
    "user": "metadata.user_id",
    "thinking_token_budget": "thinking.budget_tokens",
}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesTranslation:
    """The messages of a body, with the client's names of them for errors."""

    def __init__(self, body: CountTokensRequest) -> None:
        """Raises InvalidRequestError: a block is not as it must be; names it."""
        self.messages: list[dict[str, Any]] = []
        self.names = dict(_NAMES)
        """The client's names of fields and places of the chat body, for `renamed`."""
        if body.system is not None:
            content = text_or_parts(body.system, "system", _text)
            self._add({"role": "system", "content": content}, "system")
            self.names["messages[0].content"] = "system"
        for index, message in enumerate(body.messages):
            self._add_message(message, f"messages[{index}]")

    @property
    def continues(self) -> bool:
        """True if the last message is the beginning of the answer."""
        last = self.messages[-1] if self.messages else {}
        return (
            last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last
        )

    def _add(self, message: dict[str, Any], place: str) -> None:
        self.names[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)

    def _add_message(self, message: InputMessage, place: str) -> None:
        content = message.content
        if isinstance(content, str):
            self._add({"role": message.role, "content": content}, place)
        elif message.role == "assistant":
            self._add(_reply(content, f"{place}.content"), place)
        else:
            self._add_blocks(message.role, content, f"{place}.content")

    def _add_blocks(self, role: str, blocks: Sequence[Block], place: str) -> None:
        """A user's message: results of tools are messages of their own, texts between them are the user's."""
        texts: list[str] = []
        num_before = len(self.messages)
        for index, block in enumerate(blocks):
            where = f"{place}[{index}]"
            if block.get("type") == "tool_result" and role == "user":
                self._add_texts(role, texts, place)
                self._add(_result(block, where), where)
            else:
                texts.append(_text(block, where))
        if texts or len(self.messages) == num_before:
            self._add_texts(role, texts or [""], place)

    def _add_texts(self, role: str, texts: list[str], place: str) -> None:
        if texts:
            self._add({"role": role, "content": content_of(texts)}, place)
            texts.clear()


def _reply(blocks: Sequence[Block], place: str) -> dict[str, Any]:
    """An assistant's message. Redacted thinking is left out: nobody can read it."""
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        where = f"{place}[{index}]"
        match block.get("type"):
            case "thinking":
                thoughts.append(text_in(block, "thinking", where))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                texts.append(_text(block, where))
    reply: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        reply["reasoning_content"] = "\n".join(thoughts)
    if calls:
        reply["tool_calls"] = calls
    return reply


def _call(block: Block, place: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        refuse(f"{place}.input", "must be an object")
    function = {
        "name": text_in(block, "name", place),
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    return {"id": text_in(block, "id", place), "type": "function", "function": function}


def _result(block: Block, place: str) -> dict[str, Any]:
    """A tool's message. The word `Error` tells the model of a failed call, for which templates have no field."""
    content = text_or_parts(block.get("content") or "", f"{place}.content", _text)
    if block.get("is_error") and isinstance(content, list):
        content[0]["text"] = f"Error: {content[0]['text']}"
    elif block.get("is_error"):
        content = f"Error: {content}"
    call_id = text_in(block, "tool_use_id", place)
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _text(block: object, place: str) -> str:
    """The text of a text block. Raises InvalidRequestError: it is another block."""
    if not isinstance(block, dict):
        refuse(place, "must be an object")
    kind = text_in(block, "type", place)
    if kind != "text":
        rule = f"{kind[:64]!r} is not served here: the model reads text"
        refuse(f"{place}.type", rule, "not_supported")
    return text_in(block, "text", place)


def chat_request(
    body: CountTokensRequest, translation: MessagesTranslation, ignored: Ignored
) -> ChatRequest:
    """The chat body; what has no effect is noted in `ignored`.
    Raises InvalidRequestError: a field is not as it must be; names it."""
    fields: dict[str, Any] = {"messages": translation.messages}
    for name in _SHARED_FIELDS:
        value = getattr(body, name, None)
        if value is not None:
            fields[name] = value
    if isinstance(body, MessagesRequest):
        fields["max_completion_tokens"] = body.max_tokens
    if translation.continues:
        fields["continue_final_message"] = True
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    user_id = (body.metadata or {}).get("user_id")
    if user_id is not None:
        fields["user"] = user_id
    fields |= _tools(body, translation, ignored) | _thinking(body)
    if body.context_management is not None:
        edits, tools = body.context_management.edits, fields.get("tools")
        check_edits(edits, "context_management.edits", translation.messages, tools)
    config = body.output_config
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    with renamed(translation.names):
        return convert_body(fields, ChatRequest, ignored)


def _tools(
    body: CountTokensRequest, translation: MessagesTranslation, ignored: Ignored
) -> dict[str, Any]:
    """The tools that the client describes. Those that Anthropic's servers run or describe are left out."""
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(body.tools or ()):
        place = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            ignored.note(f"tools.{tool.type}")
            continue
        if not tool.name:
            refuse(f"{place}.name", "is missing", "missing_field")
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        given = {name: value for name, value in function.items() if value is not None}
        tools.append({"type": "function", "function": given})
        name = f"tools[{len(tools) - 1}].function"
        translation.names[name] = place
        translation.names[f"{name}.parameters"] = f"{place}.input_schema"
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    choice = body.tool_choice
    if choice is None:
        return fields
    fields["tool_choice"] = _tool_choice(choice)
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return _TOOL_CHOICES[choice.type]
    if not choice.name:
        refuse("tool_choice.name", "is missing", "missing_field")
    return {"type": "function", "function": {"name": choice.name}}


def _thinking(body: CountTokensRequest) -> dict[str, Any]:
    """The fields that say how much the model thinks; without any the model does as it does by default."""
    thinking, config = body.thinking, body.output_config
    fields: dict[str, Any] = {}
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if thinking is not None and thinking.type != "adaptive":
        is_on = thinking.type == "enabled"
        switches = {"enable_thinking": is_on, "thinking": is_on}
        fields["chat_template_kwargs"] = {**switches, **(body.chat_template_kwargs or {})}
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
        fields["thinking_token_budget"] = thinking.budget_tokens
    if thinking is not None and thinking.display == "omitted":
        fields["include_reasoning"] = False
    return fields
