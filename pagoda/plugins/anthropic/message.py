# SPDX-License-Identifier: Apache-2.0
"""The message object and its events, filled by one answer."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Any

from pagoda.api.answers.conversation import Conversation
from pagoda.api.answers.generation import AnswerShape
from pagoda.api.answers.output_parser import AnswerDelta, ToolCallDelta
from pagoda.api.errors import ApiError
from pagoda.api.http.sse import EventTemplate, encode_json
from pagoda.messages.frontend import FinishReason
from pagoda.text.text_generator import TextDelta

ABORTED = ApiError(503, "The answer was aborted.")

_NOTHING = {"stop_details": None, "container": None}
"""Fields of a message that strict clients read, about refusals and containers of code."""
_CUT = ("max_tokens", "model_context_window_exceeded")
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of delta and its field, by the type of block."""


def message_event(body: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), encode_json(body))


class _Block:
    """A block of content that grows."""

    def __init__(self, kind: str, index: int, head: dict[str, Any]) -> None:
        """`head` is the block as it begins, without its text."""
        self.kind = kind
        self._index = index
        self._head = head
        self._texts: list[str] = []
        delta_type, field = _DELTAS[kind]
        place = EventTemplate.PLACE
        self._template = EventTemplate(self._delta({"type": delta_type, field: place}))

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> bytes:
        block = {"type": self.kind, **self._head}
        return message_event(
            {"type": "content_block_start", "index": self._index, "content_block": block}
        )

    def add(self, text: str) -> bytes:
        """The event of more text; empty for no text."""
        self._texts.append(text)
        return self._template.fill(text) if text else b""

    def end(self) -> bytes:
        signature = b""
        if self.kind == "thinking":
            signature = self._delta({"type": "signature_delta", "signature": self._signature()})
        return signature + message_event({"type": "content_block_stop", "index": self._index})

    def value(self) -> dict[str, Any] | None:
        """The block as it is now; None for a call whose input is no JSON object."""
        match self.kind:
            case "text":
                return {"type": "text", "text": self.text}
            case "thinking":
                return {"type": "thinking", "thinking": self.text, "signature": self._signature()}
        arguments = _object(self.text)
        return None if arguments is None else {"type": "tool_use", **self._head, "input": arguments}

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return message_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _signature(self) -> str:
        """A digest of the thoughts. Clients send it back, and some drop thoughts without one; nobody checks it."""
        return hashlib.sha256(self.text.encode()).hexdigest()


class MessageAnswer:
    """One message, in one piece or as events: the only answer of its generation, and the shape of it, too."""

    def __init__(
        self, conversation: Conversation, *, model: str, max_tokens: int, edits: bool = False
    ) -> None:
        """`max_tokens` is what the client asked for, which may be more than the context has room for. With `edits`
        the client is told that its conversation was not edited."""
        self._generation = conversation.generation
        [self._reader] = conversation.readers
        self._new_call_id = conversation.new_call_id
        self._max_tokens = max_tokens
        self._fields = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._edits: dict[str, Any] = {"context_management": {"applied_edits": []}} if edits else {}
        self._blocks: list[_Block] = []
        self._call_index = -1
        """Index of the call that is the last block; -1 for another block."""
        self._stop_sequence: str | None = None
        self._has_begun = False

    @property
    def answers(self) -> Sequence[AnswerShape]:
        return (self,)

    @property
    def is_complete(self) -> bool:
        return self._reader.is_complete

    def add(self, delta: TextDelta) -> None:
        self.events(delta)

    def events(self, delta: TextDelta) -> bytes:
        parts = self._reader.read(delta)
        if isinstance(delta.stop_reason, str):
            self._stop_sequence = delta.stop_reason
        return self._begin() + self._add(parts)

    def whole(self) -> dict[str, Any]:
        """Raises ApiError: the answer was aborted."""
        stop_reason = self._stop_reason()
        if not self._blocks:
            self._open("text", {"text": ""})
        message: dict[str, Any] = {
            **self._fields,
            "content": self._content(is_cut=stop_reason in _CUT),
            "stop_reason": stop_reason,
            "stop_sequence": self._shown_stop_sequence(stop_reason),
            **_NOTHING,
            "usage": self._usage(),
            **self._edits,
        }
        return message | self._generation.transfer_fields(self._generation.kv_source)

    def _content(self, *, is_cut: bool) -> list[dict[str, Any]]:
        """All blocks. A call that was cut is left out; one that the model has not spelled as JSON becomes text."""
        content = []
        for block in self._blocks:
            value = block.value()
            if value is not None:
                content.append(value)
            elif not is_cut:
                content.append({"type": "text", "text": block.text})
        return content

    def end(self) -> bytes:
        """Raises ApiError: the answer was aborted."""
        stop_reason = self._stop_reason()
        events = self._begin()
        if not self._blocks:
            events += self._open("text", {"text": ""})
        events += self._blocks[-1].end()
        delta = {
            "stop_reason": stop_reason,
            "stop_sequence": self._shown_stop_sequence(stop_reason),
            **_NOTHING,
        }
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(), **self._edits}
        events += message_event(last)
        return events + message_event({"type": "message_stop"})

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message: dict[str, Any] = {
            **self._fields,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **_NOTHING,
            "usage": {**self._usage(), "output_tokens": 0},
        }
        return message_event({"type": "message_start", "message": message}) + PING

    def _add(self, parts: AnswerDelta) -> bytes:
        events = b""
        if parts.reasoning:
            events += self._block("thinking", {"thinking": "", "signature": ""}, parts.reasoning)
        if parts.content:
            events += self._block("text", {"text": ""}, parts.content)
        for call in parts.tool_calls:
            events += self._call(call)
        return events

    def _block(self, kind: str, head: dict[str, Any], text: str) -> bytes:
        events = b""
        if not self._blocks or self._blocks[-1].kind != kind:
            events = self._open(kind, head)
        return events + self._blocks[-1].add(text)

    def _call(self, call: ToolCallDelta) -> bytes:
        events = b""
        is_open = bool(self._blocks) and self._blocks[-1].kind == "tool_use"
        if not is_open or call.index != self._call_index:
            self._call_index = call.index
            name = call.name or ""
            head = {"id": self._new_call_id(name, call.index), "name": name, "input": {}}
            events = self._open("tool_use", head)
        return events + self._blocks[-1].add(call.arguments)

    def _open(self, kind: str, head: dict[str, Any]) -> bytes:
        """Ends the last block and begins another one."""
        before = self._blocks[-1].end() if self._blocks else b""
        self._blocks.append(_Block(kind, len(self._blocks), head))
        return before + self._blocks[-1].begin()

    def _stop_reason(self) -> str:
        match self._reader.finish_reason:
            case FinishReason.LENGTH:
                is_full = self._generation.usage.num_completion_tokens < self._max_tokens
                return "model_context_window_exceeded" if is_full else "max_tokens"
            case None | FinishReason.ABORT:
                raise ABORTED
        if any(block.kind == "tool_use" and block.value() for block in self._blocks):
            return "tool_use"
        return "end_turn" if self._stop_sequence is None else "stop_sequence"

    def _shown_stop_sequence(self, stop_reason: str) -> str | None:
        return self._stop_sequence if stop_reason == "stop_sequence" else None

    def _usage(self) -> dict[str, Any]:
        """The usage. Tokens that were cached are not among the input tokens, by Anthropic's definition."""
        usage = self._generation.usage
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens or 0},
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "server_tool_use": None,
            "inference_geo": None,
            "service_tier": "standard",
        }


PING = message_event({"type": "ping"})


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a call's input spells; None if it is none, because it was cut, for example."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
