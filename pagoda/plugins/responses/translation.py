# SPDX-License-Identifier: Apache-2.0
"""Translation of a body of the Responses API: items become messages, and errors keep the client's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.api.bodies.body import convert_body, text_in, text_or_parts
from pagoda.api.bodies.context_management import check_edits
from pagoda.api.bodies.fields import GenerationFields, renamed
from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.api.bodies.items import Item
from pagoda.api.openai.bodies import ChatRequest
from pagoda.errors import refuse
from pagoda.plugins.responses.bodies import Input, InputTokensRequest, ResponsesRequest
from pagoda.plugins.responses.tools import chat_tool_choice, chat_tools, named_in
from pagoda.text.templates.generic_tools import text_of

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_MEDIA_PARTS = frozenset({"input_image", "input_file", "input_audio", "image_url"})
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_TEXT_PLACE = "input"
"""The name of an input that is a text."""
_SYSTEM_ROLES = frozenset({"system", "developer"})
_OWN_FIELDS = frozenset(
    {"stream", "stream_options", "store", "metadata", "service_tier", "max_tokens", "n", "best_of"}
)
"""Fields of a response that chat completions need not know."""
_SHARED_FIELDS = tuple(
    name for name in GenerationFields.__struct_fields__ if name not in _OWN_FIELDS
)
_CHAT_FIELDS = (
    *("parallel_tool_calls", "top_logprobs", "chat_template_kwargs", "include_reasoning"),
    *_SHARED_FIELDS,
)
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}


PlacedItems = Sequence[tuple[Item, str]]
"""Items with their names for errors."""


class ChatTranslation:
    """The messages of a conversation of items, with the items' names for errors."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = dict(_NAMES)
        """The client's names of fields and places of the chat body, for `renamed`."""
        self._reply: dict[str, Any] | None = None
        """The assistant's message that the next item may be part of."""

    def add_instructions(self, instructions: str) -> None:
        """The system message, which comes first."""
        self._add({"role": "system", "content": instructions}, "instructions")
        self.names["messages[0].content"] = "instructions"

    def add_item(self, item: Item, place: str) -> None:
        """Adds an item, which errors name `place`. Raises InvalidRequestError: it is no such item."""
        kind = item.get("type") or ("message" if "role" in item else None)
        match kind:
            case "message":
                self._add_message(item, place)
            case "reasoning":
                self._open_reply(place, "reasoning_content", "content", "tool_calls")[
                    "reasoning_content"
                ] = _reasoning(item, place)
            case "function_call":
                self._add_call(item, place)
            case "function_call_output":
                call_id = text_in(item, "call_id", place)
                content = text_or_parts(item.get("output"), f"{place}.output", _part_text)
                self._add({"role": "tool", "tool_call_id": call_id, "content": content}, place)
            case str():
                refuse(f"{place}.type", f"{kind[:64]!r} is not served here", "not_supported")
            case _:
                refuse(f"{place}.type", "is missing", "missing_field")

    def _add_message(self, item: Item, place: str) -> None:
        role = text_in(item, "role", place)
        if role not in _ROLES:
            refuse(f"{place}.role", f"must be one of {', '.join(sorted(_ROLES))}")
        content = text_or_parts(item.get("content"), f"{place}.content", _part_text)
        if role == "assistant":
            self._open_reply(place, "content", "tool_calls")["content"] = content
            return
        self._add({"role": role, "content": content}, place)

    def _add_call(self, item: Item, place: str) -> None:
        function = {
            "name": named_in(item, place),
            "arguments": text_in(item, "arguments", place),
        }
        call = {"id": text_in(item, "call_id", place), "type": "function", "function": function}
        calls = self._open_reply(place).setdefault("tool_calls", [])
        calls.append(call)
        message = f"messages[{len(self.messages) - 1}]"
        self.names[f"{message}.tool_calls[{len(calls) - 1}].function"] = place

    def _open_reply(self, place: str, *taken: str) -> dict[str, Any]:
        """The assistant's message that goes on, or a new one if it has one of the parts `taken` already."""
        reply = self._reply
        if reply is None or any(part in reply for part in taken):
            reply = {"role": "assistant"}
            self._add(reply, place)
            self._reply = reply
        return reply

    def _add(self, message: dict[str, Any], place: str) -> None:
        self._reply = None
        name = f"messages[{len(self.messages)}]"
        self.names[name] = place
        if place == _TEXT_PLACE:
            self.names[f"{name}.content"] = place
        self.messages.append(message)

    def end(self) -> list[dict[str, Any]]:
        """All messages. A reply of reasoning alone has an empty content."""
        for message in self.messages:
            if message["role"] == "assistant" and "tool_calls" not in message:
                message.setdefault("content", "")
        return self.messages


def placed_items(
    given: Input | None, history: Sequence[Item], items: Sequence[Item]
) -> PlacedItems:
    """The items of a conversation with their names for errors: `history`, which earlier responses hold, and the
    new `items`, or the user's message if `given` is a text."""
    placed = [(item, "previous_response_id") for item in history]
    if isinstance(given, str):
        return [*placed, ({"role": "user", "content": given}, _TEXT_PLACE)]
    return placed + [(item, f"input[{index}]") for index, item in enumerate(items)]


def turns(items: PlacedItems) -> list[int]:
    """The places at which a conversation may begin if it is too long: 0, and the user's later messages."""
    later = [index for index, (item, _) in enumerate(items) if item.get("role") == "user"]
    return [0, *(index for index in later if index > 0)]


def without_beginning(items: PlacedItems, start: int) -> PlacedItems:
    """The items from `start` on, behind the messages of the system before it."""
    system = [placed for placed in items[:start] if placed[0].get("role") in _SYSTEM_ROLES]
    return [*system, *items[start:]]


def chat_request(
    body: ResponsesRequest | InputTokensRequest,
    translation: ChatTranslation,
    items: PlacedItems,
    ignored: Ignored,
) -> ChatRequest:
    """The chat body of a conversation. What has no effect is noted in `ignored`.
    Raises InvalidRequestError: an item or a field is not as it must be; names the field."""
    if body.instructions:
        translation.add_instructions(body.instructions)
    for item, place in items:
        translation.add_item(item, place)
    fields: dict[str, Any] = {"messages": translation.end()}
    if isinstance(body, ResponsesRequest) and body.context_management:
        check_edits(body.context_management, "context_management", fields["messages"], body.tools)
    for name in _CHAT_FIELDS:
        value = getattr(body, name, None)
        if value is not None:
            fields[name] = value
    last = items[-1][0] if items else {}
    if last.get("role") == "assistant" and last.get("status") in ("in_progress", "incomplete"):
        fields["continue_final_message"] = True
    if isinstance(body, ResponsesRequest):
        fields["max_completion_tokens"] = body.max_output_tokens
        fields["logprobs"] = body.wants_logprobs
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        if "response_format" in fields:
            refuse("text.format", "and response_format are both given")
        fields["response_format"] = _response_format(body.text.format)
    if body.tools:
        fields["tools"] = chat_tools(body.tools, ignored, translation.names)
    if body.tool_choice is not None:
        fields["tool_choice"] = chat_tool_choice(body.tool_choice)
    with renamed(translation.names):
        return convert_body(fields, ChatRequest, ignored)


def _part_text(part: object, place: str) -> str:
    if not isinstance(part, dict):
        refuse(place, "must be an object")
    kind = part.get("type")
    if kind == "refusal":
        return text_in(part, "refusal", place)
    if kind in _MEDIA_PARTS:
        refuse(f"{place}.type", f"{kind!r} is not served: the model reads text", "not_supported")
    if kind not in _TEXT_PARTS:
        refuse(f"{place}.type", "must be input_text, output_text or refusal")
    return text_in(part, "text", place)


def _reasoning(item: Item, place: str) -> str:
    """The text of a reasoning item: its content, else its summary."""
    for name in ("content", "summary"):
        if item.get(name):
            return text_of(text_or_parts(item[name], f"{place}.{name}", _part_text))
    if item.get("encrypted_content"):
        refuse(f"{place}.encrypted_content", "of another server cannot be read", "not_supported")
    return ""


def _response_format(text_format: Mapping[str, Any]) -> dict[str, Any]:
    """`text.format` as `response_format` of chat completions."""
    if text_format.get("type") != "json_schema":
        return dict(text_format)
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
