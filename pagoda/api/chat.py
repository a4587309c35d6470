"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import Any

from aiohttp import web

from pagoda.api.generation import Answer, Job, prepare
from pagoda.api.logprobs import chat_logprobs
from pagoda.api.output_parser import AnswerDelta, OutputParser, ToolCallDelta
from pagoda.api.protocol import ChatRequest, chat_logprobs_count, chat_max_tokens
from pagoda.api.request_context import RequestContext
from pagoda.api.sse import EventTemplate
from pagoda.errors import InvalidRequestError
from pagoda.frontend.text_generator import TextDelta, joined_deltas
from pagoda.messages.frontend import FinishReason

_NO_TOKENS = TextDelta("", [])


async def chat_completions(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(ChatRequest)
    generator = context.service.admit(body.model)
    template = generator.text.require_template()
    tools = body.tools if body.tool_choice != "none" else None
    if tools and template.takes_tools and not template.hermes_tool_calls:
        raise InvalidRequestError(
            "the way in which this model calls tools is not supported yet; only <tool_call> is.",
            param="tools",
        )
    prompt = await generator.render(
        body.messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    with _renamed_max_tokens(body):
        requests = await prepare(
            context,
            body,
            generator,
            [prompt],
            max_tokens=chat_max_tokens(body),
            logprobs=chat_logprobs_count(body),
            add_special_tokens=bool(body.add_special_tokens),
            param="messages",
        )
    job = Job(
        context,
        body,
        generator,
        requests,
        id_prefix="chatcmpl",
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
    )
    if job.return_token_ids:
        job.extra["prompt_token_ids"] = requests[0].request.prompt_token_ids
    in_reasoning = template.thinks and prompt.rstrip().endswith("<think>")

    def make_answer(index: int) -> _ChatAnswer:
        parser = OutputParser(
            thinks=template.thinks, in_reasoning=in_reasoning, calls_tools=bool(tools)
        )
        return _ChatAnswer(job, index, body, parser, thinks=template.thinks)

    return await job.respond(make_answer)


@contextmanager
def _renamed_max_tokens(body: ChatRequest) -> Iterator[None]:
    """Lets errors about `max_tokens` name `max_completion_tokens` where the client wrote that."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != "max_tokens" or body.max_completion_tokens is None:
            raise
        message = str(error).replace("max_tokens", "max_completion_tokens")
        raise type(error)(message, param="max_completion_tokens") from None


class _ChatAnswer(Answer):
    """A message: content, reasoning and tool calls."""

    def __init__(
        self, job: Job, index: int, body: ChatRequest, parser: OutputParser, *, thinks: bool
    ) -> None:
        super().__init__(job, index, has_logprobs=bool(body.logprobs))
        self._parser = parser
        self._shows_reasoning = body.include_reasoning is not False
        self._has_reasoning = thinks and self._shows_reasoning
        self._is_single_call = body.parallel_tool_calls is False
        self._parts: list[AnswerDelta] = []
        self._finish_reason: str | None = None
        place = EventTemplate.PLACE
        self._content_event = job.template(self._choice("delta", {"content": place}))
        self._reasoning_event = job.template(self._choice("delta", {"reasoning_content": place}))

    def _parse(self, delta: TextDelta) -> AnswerDelta:
        """The parts of a delta. Sets the finish reason; one call is enough if no more are allowed."""
        parser = self._parser
        parts = parser.push(delta.text)
        self._finish_reason = delta.finish_reason
        if delta.finish_reason is not None:
            parts = AnswerDelta.joined((parts, parser.flush()))
        is_enough = self._is_single_call and parser.one_call_complete
        if is_enough:
            parts = parts.first_call_only()
        if parser.num_calls and (is_enough or delta.finish_reason is FinishReason.STOP):
            self._finish_reason = "tool_calls"
            self.is_complete = True
        return parts

    def _choice(
        self, shape: str, message: dict[str, Any], delta: TextDelta = _NO_TOKENS
    ) -> dict[str, Any]:
        """The choice with a whole `message` or a `delta` (`shape`)."""
        logprobs = None
        if self._has_logprobs and delta.logprobs is not None:
            tokenizer = self._job.generator.text.tokenizer
            logprobs = chat_logprobs(tokenizer, delta.token_ids, delta.logprobs)
        choice = self._choice_with({shape: message}, delta, logprobs)
        choice["finish_reason"] = self._finish_reason
        return choice

    # ---- in one piece

    def add(self, delta: TextDelta) -> None:
        super().add(delta)
        self._parts.append(self._parse(delta))

    def choice(self) -> dict[str, Any]:
        parts = AnswerDelta.joined(self._parts)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if parts.tool_calls:
            message["content"] = parts.content or None
            calls = groupby(parts.tool_calls, attrgetter("index"))
            message["tool_calls"] = [_whole_call(list(pieces)) for _, pieces in calls]
        if self._has_reasoning:
            message["reasoning_content"] = parts.reasoning or None
        return self._choice("message", message, joined_deltas(self._deltas))

    # ---- as a stream

    def events(self, delta: TextDelta) -> bytes:
        if self._has_begun:
            return self._event(delta)
        self._has_begun = True
        fields: dict[str, Any] = {}
        if self._job.return_token_ids:
            fields["prompt_token_ids"] = self._request.prompt_token_ids
        begin = self._choice("delta", {"role": "assistant", "content": ""})
        return self._job.event(begin, **fields) + self._event(delta)

    def _event(self, delta: TextDelta) -> bytes:
        is_simple = self._is_simple and delta.finish_reason is None
        if is_simple and self._parser.transparent:
            return self._content_event.fill(delta.text) if delta.text else b""
        parts = self._parse(delta)
        reasoning = parts.reasoning if self._shows_reasoning else ""
        if is_simple and not self.is_complete and not parts.tool_calls:
            if not reasoning:
                return self._content_event.fill(parts.content) if parts.content else b""
            if not parts.content:
                return self._reasoning_event.fill(reasoning)
        message: dict[str, Any] = {}
        if parts.content:
            message["content"] = parts.content
        if reasoning:
            message["reasoning_content"] = reasoning
        if parts.tool_calls:
            message["tool_calls"] = [_call_piece(piece) for piece in parts.tool_calls]
        return self._job.event(self._choice("delta", message, delta), delta)


def _whole_call(pieces: Sequence[ToolCallDelta]) -> dict[str, Any]:
    """A tool call as OpenAI spells it; the first piece has the name."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {
            "name": pieces[0].name,
            "arguments": "".join(piece.arguments for piece in pieces),
        },
    }


def _call_piece(piece: ToolCallDelta) -> dict[str, Any]:
    """A piece of a tool call as OpenAI spells it; the first piece has the name and the id."""
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {"index": piece.index, **_whole_call([piece])}
