"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.kv_transfer import Handoff, handoff_of, transfer_fields, with_one_token
from pagoda.api.logprobs import chat_logprobs
from pagoda.api.output_parser import AnswerDelta, OutputParser, ToolCallDelta
from pagoda.api.protocol import (
    ChatRequest,
    chat_logprobs_count,
    chat_max_tokens,
    sampling_params,
    session_of,
)
from pagoda.api.request_context import RequestContext
from pagoda.api.sse import DONE, EventStream, EventTemplate, event
from pagoda.api.usage import SYSTEM_FINGERPRINT, Usage, check_delta, for_all
from pagoda.errors import InvalidRequestError
from pagoda.frontend.async_utils import merge
from pagoda.frontend.conversation import render_conversation
from pagoda.frontend.request_tracker import ClientRequest
from pagoda.frontend.text_generator import (
    TextDelta,
    TextGenerator,
    TextRequest,
)
from pagoda.messages.frontend import FinishReason


async def chat_completions(call: RequestContext) -> web.StreamResponse:
    """Answers a conversation, in one piece or as a stream."""
    body = await call.parse(ChatRequest)
    generator = call.service.admit(body.model)
    session = session_of(body, call.session_header)
    role, is_router = generator.endpoint.limits.role, call.service.is_router
    handoff = handoff_of(body, role, is_router=is_router)
    model = call.service.config.served_model_name
    job = await _prepare(body, generator, model, session, handoff, call.client_request)
    if body.stream:
        return await call.stream(job.stream)
    return call.json(await job.whole())


async def _prepare(
    body: ChatRequest,
    generator: TextGenerator,
    model: str,
    session: str | None,
    handoff: Handoff,
    client_request: ClientRequest,
) -> _Job:
    template = generator.text.require_template()
    tools = body.tools if body.tool_choice != "none" else None
    if tools and template.takes_tools and not template.hermes_tool_calls:
        raise InvalidRequestError(
            "the way in which this model calls tools is not supported yet; only <tool_call> is.",
            param="tools",
        )
    prompt = render_conversation(
        template,
        body.messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        switches=body.chat_template_kwargs,
    )
    max_tokens = chat_max_tokens(body)
    with _spelled(body):
        sampling = sampling_params(
            with_one_token(body, max_tokens) if handoff.holds_kv else body,
            max_tokens=max_tokens,
            logprobs=chat_logprobs_count(body),
            defaults=generator.text.default_sampling,
        )
        requests = await generator.prepare(
            prompt,
            sampling,
            param="messages",
            add_special_tokens=bool(body.add_special_tokens),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            session=session,
            holds_kv=handoff.holds_kv,
            kv_source=handoff.kv_source,
            client_request=client_request,
        )
    return _Job(
        body=body,
        generator=generator,
        requests=requests,
        model=model,
        thinks=template.thinks,
        in_reasoning=template.thinks and prompt.rstrip().endswith("<think>"),
        calls_tools=bool(tools),
    )


@contextmanager
def _spelled(body: ChatRequest) -> Iterator[None]:
    """Errors about `max_tokens` name `max_completion_tokens` where the client wrote that."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != "max_tokens" or body.max_completion_tokens is None:
            raise
        message = str(error).replace("max_tokens", "max_completion_tokens")
        raise type(error)(message, param="max_completion_tokens") from None


class _ChatDelta(msgspec.Struct, frozen=True):
    answer: AnswerDelta
    raw: TextDelta
    finish_reason: str | None


@dataclass
class _Job:
    """One conversation on its way to `n` answers."""

    body: ChatRequest
    generator: TextGenerator
    requests: Sequence[TextRequest]
    model: str
    thinks: bool
    in_reasoning: bool
    calls_tools: bool
    last_fields: dict[str, Any] = field(default_factory=dict)
    """What the last delta adds to the object of the whole answer."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": choices,
        }

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        return chat_logprobs(self.generator.text.tokenizer, delta.token_ids, delta.logprobs)

    async def _answers(self, request: TextRequest) -> AsyncGenerator[_ChatDelta, None]:
        """The deltas of one answer, taken apart. Ends early behind the only call that is allowed."""
        parser = OutputParser(
            thinks=self.thinks, in_reasoning=self.in_reasoning, calls_tools=self.calls_tools
        )
        single_call = self.body.parallel_tool_calls is False
        async with aclosing(self.generator.stream(request)) as deltas:
            async for delta in deltas:
                check_delta(delta, request)
                if parser.transparent:
                    answer = AnswerDelta(delta.text)
                else:
                    answer = parser.push(delta.text)
                reason = delta.finish_reason
                if reason is not None:
                    answer = _joined(answer, parser.flush())
                enough = single_call and parser.one_call_complete
                if enough:
                    answer = _first_call_only(answer)
                if parser.num_calls and (enough or reason is FinishReason.STOP):
                    yield _ChatDelta(answer, delta, "tool_calls")
                    return
                yield _ChatDelta(answer, delta, reason)

    # ---- in one piece

    async def whole(self) -> dict[str, Any]:
        """The response object."""
        usage = Usage(self.requests)
        indexes = range(len(self.requests))
        choices = await for_all(indexes, lambda index: self._whole_choice(index, usage))
        response = {
            **self._envelope("chat.completion", choices),
            "usage": usage.as_dict(self.requests),
            **self.last_fields,
        }
        if self.body.return_token_ids:
            response["prompt_token_ids"] = self.requests[0].request.prompt_token_ids
        return response

    async def _whole_choice(self, index: int, usage: Usage) -> dict[str, Any]:
        content, reasoning, token_ids = [], [], list[int]()
        calls = _Calls()
        logprobs: list[Any] = []
        finish_reason, stop_reason = None, None
        async with aclosing(self._answers(self.requests[index])) as deltas:
            async for delta in deltas:
                usage.add(index, delta.raw)
                content.append(delta.answer.content)
                reasoning.append(delta.answer.reasoning)
                calls.add(delta.answer.tool_calls)
                token_ids += delta.raw.token_ids
                logprobs += (self._logprobs(delta.raw) or {}).get("content", ())
                finish_reason, stop_reason = delta.finish_reason, delta.raw.stop_reason
                self.last_fields |= transfer_fields(delta.raw)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
        if calls.complete:
            message["content"] = message["content"] or None
            message["tool_calls"] = calls.complete
        if self.thinks and self.body.include_reasoning is not False:
            message["reasoning_content"] = "".join(reasoning) or None
        choice = {
            "index": index,
            "message": message,
            "logprobs": {"content": logprobs} if self.body.logprobs else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = token_ids
        return choice

    # ---- as a stream

    async def stream(self, stream: EventStream) -> None:
        """Sends the role, then one event per delta, the usage if asked for, and the end mark."""
        usage = Usage(self.requests)
        options = self.body.stream_options
        formats = [_ChoiceEvents(self, index, usage) for index in range(len(self.requests))]
        answers = [self._answers(request) for request in self.requests]
        async with aclosing(merge(answers)) as deltas:
            async for index, delta in deltas:
                usage.add(index, delta.raw)
                events = formats[index].encode(delta)
                if events:
                    await stream.send(events)
        if options is not None and options.include_usage:
            total = usage.as_dict(self.requests)
            await stream.send(
                event({**self._envelope("chat.completion.chunk", []), "usage": total})
            )
        await stream.send(DONE)


class _ChoiceEvents:
    """The events of one answer."""

    def __init__(self, job: _Job, index: int, usage: Usage) -> None:
        options = job.body.stream_options
        self._job = job
        self._index = index
        self._usage = usage
        self._calls = _Calls()
        self._started = False
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._null_usage = options is not None and bool(options.include_usage)
        self._shows_reasoning = job.body.include_reasoning is not False
        self._simple = not (self._continuous or job.body.logprobs or job.body.return_token_ids)
        self._content = EventTemplate(self._chunk({"content": EventTemplate.PLACE}))
        self._reasoning = EventTemplate(self._chunk({"reasoning_content": EventTemplate.PLACE}))

    def encode(self, delta: _ChatDelta) -> bytes:
        """The events for one delta; none if it has nothing that a client can see."""
        if not self._started:
            self._started = True
            return self._begin() + self.encode(delta)
        answer = delta.answer
        if self._simple and delta.finish_reason is None and not answer.tool_calls:
            if not answer.reasoning:
                return self._content.fill(answer.content) if answer.content else b""
            if not answer.content:
                return self._reasoning.fill(answer.reasoning) if self._shows_reasoning else b""
        return self._general(delta)

    def _begin(self) -> bytes:
        chunk = self._chunk({"role": "assistant", "content": ""})
        if self._job.body.return_token_ids:
            chunk["prompt_token_ids"] = self._job.requests[0].request.prompt_token_ids
        return event(chunk)

    def _general(self, delta: _ChatDelta) -> bytes:
        answer, raw = delta.answer, delta.raw
        fields: dict[str, Any] = {}
        if answer.content:
            fields["content"] = answer.content
        if answer.reasoning and self._shows_reasoning:
            fields["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            fields["tool_calls"] = self._calls.add(answer.tool_calls)
        chunk = self._chunk(fields)
        choice = chunk["choices"][0]
        choice["logprobs"] = self._job._logprobs(raw)
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = raw.stop_reason
        if self._job.body.return_token_ids:
            choice["token_ids"] = raw.token_ids
        if self._continuous:
            chunk["usage"] = self._usage.as_dict(self._job.requests)
        return event({**chunk, **transfer_fields(raw)})

    def _chunk(self, fields: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": self._index,
            "delta": fields,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        chunk = self._job._envelope("chat.completion.chunk", [choice])
        if self._null_usage:
            chunk["usage"] = None
        return chunk


class _Calls:
    """The tool calls of one answer, as deltas and as whole calls."""

    def __init__(self) -> None:
        self.complete: list[dict[str, Any]] = []

    def add(self, pieces: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
        """Takes in pieces and returns them in OpenAI's shape."""
        return [self._add(piece) for piece in pieces]

    def _add(self, piece: ToolCallDelta) -> dict[str, Any]:
        if piece.name is None:
            self.complete[piece.index]["function"]["arguments"] += piece.arguments
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        call: dict[str, Any] = {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }
        self.complete.append({**call, "function": dict(call["function"])})
        return {"index": piece.index, **call}


def _joined(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta:
    return AnswerDelta(
        first.content + second.content,
        first.reasoning + second.reasoning,
        first.tool_calls + second.tool_calls,
    )


def _first_call_only(answer: AnswerDelta) -> AnswerDelta:
    calls = tuple(piece for piece in answer.tool_calls if piece.index == 0)
    return AnswerDelta(answer.content, answer.reasoning, calls)
