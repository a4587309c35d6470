# SPDX-License-Identifier: Apache-2.0
"""The response object and its events, filled by one answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pagoda.api.answers.conversation import Conversation
from pagoda.api.answers.generation import AnswerShape, Generation
from pagoda.api.answers.output_parser import AnswerDelta
from pagoda.api.bodies.items import new_id
from pagoda.api.errors import ApiError
from pagoda.api.openai.logprobs import TokenSpelling, chat_entries
from pagoda.messages.frontend import FinishReason
from pagoda.plugins.responses.bodies import ResponsesRequest
from pagoda.plugins.responses.events import EventWriter
from pagoda.plugins.responses.output import Output
from pagoda.plugins.responses.tools import names_in
from pagoda.text.text_generator import TextDelta

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ABORTED = ApiError(500, "The answer was aborted.")


class ResponseAnswer:
    """One response: the object that clients get, now and later, and the events on the way.

    It is the only answer of its generation, and the shape of it, too.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        conversation: Conversation,
        *,
        model: str,
        writer: EventWriter | None,
        on_finish: Callable[[dict[str, Any]], None],
    ) -> None:
        """Events go to `writer`, if there is one. `on_finish` gets the object before the client sees the end."""
        self.response_id = new_id("resp")
        self.status: ResponseStatus = "queued" if body.background else "in_progress"
        self._body = body
        self._generation = conversation.generation
        [self._reader] = conversation.readers
        self._writer = writer
        self._on_finish = on_finish
        self._fields = _request_fields(body, conversation.generation, model)
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._error: dict[str, Any] | None = None
        self._output = Output(
            writer,
            conversation.new_call_id,
            as_summary=body.summary is not None,
            namespaces=names_in(body.tools or ()),
        )
        self._spelling = TokenSpelling(conversation.generation.generator.text.tokenizer)
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text has not come yet."""
        self._is_in_content = not conversation.has_reasoning
        """False behind reasoning and calls, whose closing tags are tokens without text."""
        self._has_started = False
        self._has_begun = False

    # ---- one answer, and the shape of a generation

    @property
    def answers(self) -> Sequence[AnswerShape]:
        return (self,)

    @property
    def is_complete(self) -> bool:
        return self._reader.is_complete

    def add(self, delta: TextDelta) -> None:
        self._begin()
        parts = self._reader.read(delta)
        if self._body.enable_response_messages:
            self._token_ids += delta.token_ids
        self._output.add(parts, self._content_logprobs(parts, delta))

    def events(self, delta: TextDelta) -> bytes:
        self.add(delta)
        return self._take_events()

    def whole(self) -> dict[str, Any]:
        """Ends the response; returns the object."""
        self._begin()
        reason = self._reader.finish_reason
        if reason in (None, FinishReason.ABORT):
            self.fail(ABORTED)
        else:
            is_cut = reason == FinishReason.LENGTH
            self._output.end(is_cut=is_cut)
            self._finish("incomplete" if is_cut else "completed")
        return self.object()

    def end(self) -> bytes:
        self.whole()
        return self._take_events()

    # ---- the life of a response

    @property
    def is_running(self) -> bool:
        return self.status in ("queued", "in_progress")

    def start(self) -> None:
        """Writes the first event, also while the response waits for its turn."""
        if not self._has_started:
            self._has_started = True
            self._write_state("response.created")

    def fail(self, error: ApiError) -> bytes:
        """Ends the response with an error; returns the events."""
        self._begin()
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._error = {"code": code, "message": error.message}
        self._finish("failed")
        return self._take_events()

    def cancel(self) -> None:
        """Ends a background response, as its client asked."""
        self.status = "cancelled"
        self._on_finish(self.object())

    def _begin(self) -> None:
        self.start()
        if not self._has_begun:
            self._has_begun = True
            self.status = "in_progress"
            self._write_state("response.in_progress")

    def _finish(self, status: Literal["completed", "incomplete", "failed"]) -> None:
        self.status = status
        if status == "completed":
            self._completed_at = int(time.time())
        self._on_finish(self.object())
        self._write_state(f"response.{status}")

    def _write_state(self, kind: str) -> None:
        if self._writer is not None:
            self._writer.write(kind, response=self.object())

    def _take_events(self) -> bytes:
        return b"" if self._writer is None else self._writer.take()

    # ---- the object

    def object(self) -> dict[str, Any]:
        """The response as it is now."""
        is_cut = self.status == "incomplete"
        fields = {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            **self._fields,
            "output": list(self._output.items),
            "usage": None if self.is_running else self._usage(),
        }
        if self._body.enable_response_messages and not self.is_running:
            fields |= self._raw_messages()
        return fields | self._generation.transfer_fields(self._generation.kv_source)

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens or 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }

    def _raw_messages(self) -> dict[str, Any]:
        [request] = self._generation.requests
        decode = self._generation.generator.text.tokenizer.decode
        output = decode(self._token_ids, skip_special_tokens=False)
        return {
            "input_messages": [_raw(request.prompt or "", request.prompt_token_ids)],
            "output_messages": [_raw(output, self._token_ids)],
        }

    def _content_logprobs(self, parts: AnswerDelta, delta: TextDelta) -> list[dict[str, Any]]:
        """The log-probabilities of the tokens of `parts.content`, as far as they are known."""
        if delta.logprobs is None:
            return []
        self._logprobs += chat_entries(self._spelling, delta.token_ids, delta.logprobs)
        if parts.reasoning or parts.tool_calls:
            self._is_in_content = False
            if not parts.content:
                self._logprobs = []
        if not parts.content:
            return []
        found, self._logprobs = self._logprobs, []
        if not self._is_in_content:
            found = _without_tags(found, parts.content)
        self._is_in_content = True
        return found


def _without_tags(entries: list[dict[str, Any]], content: str) -> list[dict[str, Any]]:
    """The last of `entries`, whose tokens spell `content`; those before them spell closing tags."""
    surplus = sum(len(entry["bytes"]) for entry in entries) - len(content.encode())
    first = 0
    while first < len(entries) and surplus >= len(entries[first]["bytes"]):
        surplus -= len(entries[first]["bytes"])
        first += 1
    return entries[first:]


def _raw(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """A message as the model sees it, as vLLM spells it."""
    return {"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}


def _request_fields(body: ResponsesRequest, generation: Generation, model: str) -> dict[str, Any]:
    """The fields of a response that say what was asked for."""
    sampling = generation.requests[0].sampling
    talk = body.conversation_id
    reasoning = body.reasoning
    effort = None if reasoning is None else reasoning.effort
    text_format = None if body.text is None else body.text.format
    tools = [_shown_tool(tool) for tool in body.tools or ()]
    return {
        "background": bool(body.background),
        "conversation": None if talk is None else {"id": talk},
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "prompt": None,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "safety_identifier": body.safety_identifier,
        "reasoning": {"effort": effort, "summary": body.summary},
        "service_tier": "default",
        "store": body.is_stored,
        "temperature": sampling.temperature,
        "text": {"format": text_format or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool, and a function with the fields that clients expect."""
    if tool.get("type") != "function":
        return tool
    return {
        "description": None,
        "parameters": {},
        "strict": False,
        **tool.get("function", {}),
        **tool,
    }
