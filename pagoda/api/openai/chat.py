# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from aiohttp import web

from pagoda.api.answers.conversation import (
    Conversation,
    MessageReader,
    begin_conversation,
    count_prompt_tokens,
)
from pagoda.api.answers.generation import Generation
from pagoda.api.answers.output_parser import AnswerDelta, ToolCallDelta
from pagoda.api.http.request_context import Caller, RequestContext
from pagoda.api.http.sse import EventTemplate
from pagoda.api.http.timing import progress_of, times_of, timings
from pagoda.api.openai.bodies import ChatRequest
from pagoda.api.openai.choices import Choices, Envelope
from pagoda.api.openai.logprobs import TokenSpelling, chat_logprobs, prompt_logprobs
from pagoda.api.openai.stored_chats import keep_chat
from pagoda.messages.frontend import TokenLogprobs
from pagoda.text.text_generator import TextDelta, joined_deltas

_NO_TOKENS = TextDelta("", [])
_NO_REASONING: Mapping[str, None] = MappingProxyType({"reasoning_content": None})
"""The field of an answer without reasoning. Its other name is left out: programs that take the one as
an alias of the other (smg, many in Rust) refuse a message with both."""


async def chat_completions(
    context: RequestContext, *, first_content: str | None = ""
) -> web.StreamResponse:
    """`first_content` is the content of the event that begins an answer: empty for OpenAI, null for llama.cpp."""
    body = await context.parse(ChatRequest)
    generation, shape = await begin_chat(context.caller, body, first_content=first_content)
    if body.store and body.stream:
        context.ignored.note("store")
    keep = partial(keep_chat, context, body) if body.store else None
    return await generation.respond(context, shape, streams=bool(body.stream), keep=keep)


async def count_chat_tokens(context: RequestContext) -> web.StreamResponse:
    """The tokens that the prompt of a conversation has."""
    body = await context.parse(ChatRequest)
    count = await count_prompt_tokens(context.caller, body)
    return context.json({"object": "response.input_tokens", "input_tokens": count})


async def begin_chat(
    caller: Caller, body: ChatRequest, *, first_content: str | None = ""
) -> tuple[Generation, Choices]:
    """Prepares the answers to a body, and their shape. Raises as `begin_conversation`."""
    conversation = await begin_conversation(caller, body)
    generation = conversation.generation
    envelope = Envelope(
        body,
        generation,
        model=caller.service.name_of(generation.generator),
        id_prefix="chatcmpl",
        kind="chat.completion.chunk" if body.stream else "chat.completion",
        always_usage=caller.service.config.always_usage,
        tells_drafts=caller.service.config.tells_drafts,
        tokens_as_ids=caller.service.config.tokens_as_ids,
    )
    answers = [
        _ChatAnswer(envelope, conversation, index, body, reader, first_content)
        for index, reader in enumerate(conversation.readers)
    ]
    return generation, Choices(envelope, answers, answers[0].whole_fields)


class _ChatAnswer:
    """A message: content, reasoning and tool calls."""

    def __init__(
        self,
        envelope: Envelope,
        conversation: Conversation,
        index: int,
        body: ChatRequest,
        reader: MessageReader,
        first_content: str | None,
    ) -> None:
        generation = conversation.generation
        self._generation = generation
        self._body = body
        self._first_content = first_content
        self._envelope = envelope
        self._index = index
        self._reader = reader
        self._prompt_token_ids = generation.requests[index].prompt_token_ids
        as_ids = envelope.tokens_as_ids
        self._tokenizer = generation.generator.text.tokenizer
        self._spelling = TokenSpelling(self._tokenizer, as_ids=as_ids)
        self._num_top = generation.requests[index].sampling.prompt_logprobs
        self._scores: list[TokenLogprobs] | None = None
        """Log-probabilities of the prompt, once they are there."""
        self._has_logprobs = bool(body.logprobs)
        self._has_begun = False
        has_more = envelope.return_token_ids or envelope.sends_continuous_usage
        self._is_simple = not (self._has_logprobs or has_more or body.timings_per_token)
        """Events differ in their text alone, but for the first and the last one."""
        self._unsaid = {} if body.include_reasoning is False else _NO_REASONING
        """Fields of reasoning where there is none: clients of DeepSeek and SGLang read the field of every event,
        also of a model that does not reason."""
        self._conversation = conversation
        self._deltas: list[TextDelta] = []
        self._parts: list[AnswerDelta] = []

    @cached_property
    def _content_event(self) -> EventTemplate:
        content = {"content": EventTemplate.PLACE, **self._unsaid}
        return self._envelope.template(self._choice("delta", content))

    @cached_property
    def _reasoning_event(self) -> EventTemplate:
        return self._envelope.template(self._choice("delta", _reasoning(EventTemplate.PLACE)))

    @property
    def is_complete(self) -> bool:
        return self._reader.is_complete

    def prompt_fields(self) -> dict[str, Any]:
        """Fields beside the choices that tell of the prompt."""
        fields: dict[str, Any] = {}
        if self._envelope.return_token_ids:
            fields["prompt_token_ids"] = self._prompt_token_ids
        if self._num_top is not None and self._scores is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, self._prompt_token_ids, self._scores, self._num_top
            )
        if self._body.verbose:
            fields["__verbose"] = {"prompt": self._generation.requests[self._index].prompt}
        return fields

    def whole_fields(self) -> dict[str, Any]:
        """Fields beside the choices of a response in one piece."""
        times = {} if self._envelope.timings is None else {"timings": self._envelope.timings}
        # vLLM's clients read log-probabilities of the prompt whether they asked for them or not.
        return {"prompt_logprobs": None, **self.prompt_fields(), **times}

    def _times(self) -> dict[str, Any]:
        """The field with the times so far, if they are wanted. The envelope keeps them for its end."""
        if not self._body.timings_per_token:
            return {}
        self._envelope.timings = timings(times_of(self._generation, self._index))
        return {"timings": self._envelope.timings}

    def _choice(
        self, shape: str, message: dict[str, Any], delta: TextDelta = _NO_TOKENS
    ) -> dict[str, Any]:
        """The choice with a whole `message` or a `delta` (`shape`)."""
        logprobs = None
        if self._has_logprobs and delta.logprobs is not None:
            logprobs = chat_logprobs(self._spelling, delta.token_ids, delta.logprobs)
        choice = self._envelope.choice(self._index, {shape: message}, delta, logprobs)
        choice["finish_reason"] = self._reader.finish_reason
        return choice

    # ---- in one piece

    def add(self, delta: TextDelta) -> None:
        self._deltas.append(delta)
        self._parts.append(self._reader.read(delta))
        if delta.finish_reason is not None:
            self._times()

    def choice(self) -> dict[str, Any]:
        parts = AnswerDelta.joined(self._parts)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if parts.tool_calls:
            message["content"] = parts.content or None
            calls = [list(p) for _, p in groupby(parts.tool_calls, attrgetter("index"))]
            if self._conversation.choice.is_function:
                message["function_call"] = _function(calls[0])
            else:
                message["tool_calls"] = [self._whole_call(pieces) for pieces in calls]
        elif self._conversation.choice.must_call and not self._conversation.choice.is_function:
            message["tool_calls"] = []  # the answer ended before its first call
        if self._unsaid:
            message |= _reasoning(parts.reasoning) if parts.reasoning else self._unsaid
        delta = joined_deltas(self._deltas)
        self._scores = delta.prompt_logprobs
        return self._choice("message", message, delta)

    # ---- as a stream

    def events(self, delta: TextDelta) -> bytes:
        if self._has_begun:
            return self._event(delta)
        self._has_begun = True
        self._scores = delta.prompt_logprobs
        message = {"role": "assistant", "content": self._first_content, **self._unsaid}
        begin = self._envelope.begin(self._choice("delta", message), **self.prompt_fields())
        if self._body.return_progress:
            begin += self._progress()
        return begin + self._event(delta)

    def _progress(self) -> bytes:
        """The events about the prompt."""
        written = b""
        for fields in progress_of(times_of(self._generation, self._index)):
            if not self._body.timings_per_token:
                del fields["timings"]
            written += self._envelope.event(self._choice("delta", dict(self._unsaid)), **fields)
        return written

    def _event(self, delta: TextDelta) -> bytes:
        is_simple = self._is_simple and delta.finish_reason is None
        if is_simple and self._reader.is_transparent:
            return self._content_event.fill(delta.text) if delta.text else b""
        parts = self._reader.read(delta)
        if is_simple and not self.is_complete and not parts.tool_calls:
            if not parts.reasoning:
                return self._content_event.fill(parts.content) if parts.content else b""
            if not parts.content:
                return self._reasoning_event.fill(parts.reasoning)
        message: dict[str, Any] = dict(self._unsaid)
        if parts.content:
            message["content"] = parts.content
        if parts.reasoning:
            message |= _reasoning(parts.reasoning)
        if parts.tool_calls and self._conversation.choice.is_function:
            message["function_call"] = _function_piece(parts.tool_calls)
        elif parts.tool_calls:
            message["tool_calls"] = [self._call_piece(piece) for piece in parts.tool_calls]
        return self._envelope.event(self._choice("delta", message, delta), delta, **self._times())

    def _whole_call(self, pieces: Sequence[ToolCallDelta]) -> dict[str, Any]:
        """A tool call as OpenAI spells it; the first piece has the name."""
        first = pieces[0]
        return {
            "id": self._conversation.new_call_id(first.name or "", first.index),
            "type": "function",
            "function": _function(pieces),
        }

    def _call_piece(self, piece: ToolCallDelta) -> dict[str, Any]:
        """A piece of a tool call as OpenAI spells it; the first piece has the name and the id."""
        if piece.name is None:
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        return {"index": piece.index, **self._whole_call([piece])}


def _reasoning(text: str) -> dict[str, Any]:
    """Reasoning under the name that DeepSeek gave it, and under that of OpenRouter and newer vLLM."""
    return {"reasoning_content": text, "reasoning": text}


def _function(pieces: Sequence[ToolCallDelta]) -> dict[str, Any]:
    """Name and arguments of a call; the first piece has the name."""
    return {"name": pieces[0].name, "arguments": "".join(piece.arguments for piece in pieces)}


def _function_piece(pieces: Sequence[ToolCallDelta]) -> dict[str, Any]:
    """A piece of the only call, for clients that speak of functions."""
    whole = _function(pieces)
    return whole if whole["name"] is not None else {"arguments": whole["arguments"]}
