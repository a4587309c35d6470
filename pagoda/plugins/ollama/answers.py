# SPDX-License-Identifier: Apache-2.0
"""The shapes of Ollama's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from pagoda.api.answers.conversation import MessageReader
from pagoda.api.answers.generation import AnswerShape, Generation
from pagoda.api.answers.output_parser import AnswerDelta
from pagoda.api.http.timing import AnswerTimes, times_of
from pagoda.api.openai.logprobs import TokenSpelling, chat_entries, encoded_entry
from pagoda.plugins.ollama.dialect import line
from pagoda.text.text_generator import TextDelta

Spell = Callable[[AnswerDelta, list[dict[str, Any]]], dict[str, Any]]
"""Spells text, reasoning and whole tool calls as the fields of one route."""


class OllamaAnswer:
    """One answer: text and reasoning piece by piece, tool calls when they are whole."""

    def __init__(
        self,
        generation: Generation,
        model: str,
        spell: Spell,
        *,
        reader: MessageReader | None,
        has_logprobs: bool,
    ) -> None:
        """`reader` is None if the text is the answer as it stands."""
        self._generation = generation
        self._model = model
        self._spell = spell
        self._reader = reader
        self._has_logprobs = has_logprobs
        self._calls = _ToolCalls()
        self._parts: list[AnswerDelta] = []
        self._whole_calls: list[dict[str, Any]] = []
        self._logprobs: list[msgspec.Raw] = []
        self._last = TextDelta("", [])
        self._times = AnswerTimes()

    @property
    def is_complete(self) -> bool:
        return self._reader is not None and self._reader.is_complete

    def _read(self, delta: TextDelta) -> tuple[AnswerDelta, list[dict[str, Any]]]:
        parts = AnswerDelta(delta.text) if self._reader is None else self._reader.read(delta)
        is_last = self.is_complete or delta.finish_reason is not None
        calls = self._calls.push(parts, is_last=is_last)
        if is_last:
            self._times = times_of(self._generation, 0)
        return parts, calls

    def _fields(self, parts: AnswerDelta, calls: list[dict[str, Any]]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **self._spell(parts, calls)}

    def _entries(self, delta: TextDelta) -> list[msgspec.Raw]:
        if not self._has_logprobs or delta.logprobs is None:
            return []
        spelling = TokenSpelling(self._generation.generator.text.tokenizer)
        entries = chat_entries(spelling, delta.token_ids, delta.logprobs)
        return list(map(encoded_entry, entries))

    def add(self, delta: TextDelta) -> None:
        parts, calls = self._read(delta)
        self._parts.append(parts)
        self._whole_calls += calls
        self._logprobs += self._entries(delta)
        self._last = delta

    def whole(self) -> dict[str, Any]:
        """The response in one piece."""
        fields = self._fields(AnswerDelta.joined(self._parts), self._whole_calls)
        logprobs = {"logprobs": self._logprobs} if self._has_logprobs else {}
        return {**fields, **logprobs, **self._ending(self._last)}

    def events(self, delta: TextDelta) -> bytes:
        parts, calls = self._read(delta)
        entries = self._entries(delta)
        written = b""
        if parts.content or parts.reasoning or calls or entries:
            logprobs = {"logprobs": entries} if entries else {}
            written = line({**self._fields(parts, calls), **logprobs, "done": False})
        if self.is_complete or delta.finish_reason is not None:
            written += line({**self._fields(AnswerDelta(), []), **self._ending(delta)})
        return written

    def _ending(self, delta: TextDelta) -> dict[str, Any]:
        """The last fields of an answer: its reason to end, and its figures, times in nanoseconds."""
        times = self._times
        is_short = str(delta.finish_reason) == "length"
        return {
            "done": True,
            "done_reason": "length" if is_short else "stop",
            "total_duration": times.total_ns,
            "load_duration": 0,
            "prompt_eval_count": times.num_prompt_tokens,
            "prompt_eval_duration": times.prompt_ns,
            "eval_count": times.num_output_tokens,
            "eval_duration": times.decode_ns,
        }


class _ToolCalls:
    """Puts calls together from their pieces."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._arguments: list[str] = []

    def push(self, parts: AnswerDelta, *, is_last: bool) -> list[dict[str, Any]]:
        """The calls that are whole now: one is when the next one begins, and at the end."""
        calls: list[dict[str, Any]] = []
        for piece in parts.tool_calls:
            if piece.name is not None:
                calls += self._take()
                self._name = piece.name
            self._arguments.append(piece.arguments)
        return calls + self._take() if is_last else calls

    def _take(self) -> list[dict[str, Any]]:
        name, text = self._name, "".join(self._arguments)
        self._name = None
        self._arguments = []
        if name is None:
            return []
        try:
            arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return []  # the answer ended inside the call
        return [{"function": {"name": name, "arguments": arguments}}]


class OllamaShape:
    """The response to a body: one answer."""

    def __init__(self, answer: OllamaAnswer) -> None:
        self.answers: Sequence[AnswerShape] = (answer,)
        self._answer = answer

    def whole(self) -> dict[str, Any]:
        return self._answer.whole()

    def end(self) -> bytes:
        return b""


def spell_message(parts: AnswerDelta, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of `/api/chat`."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.content}
    if parts.reasoning:
        message["thinking"] = parts.reasoning
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def spell_response(parts: AnswerDelta, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of `/api/generate`, which has no tool calls."""
    del calls
    fields = {"response": parts.content}
    return {**fields, "thinking": parts.reasoning} if parts.reasoning else fields
