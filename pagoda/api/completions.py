"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pagoda.api.kv_transfer import Handoff, handoff_of, transfer_fields, with_one_token
from pagoda.api.logprobs import CompletionLogprobs
from pagoda.api.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionRequest,
    prompts_of,
    sampling_params,
    session_of,
)
from pagoda.api.request_context import RequestContext
from pagoda.api.sse import DONE, EventStream, EventTemplate, event
from pagoda.api.usage import SYSTEM_FINGERPRINT, Usage, check_delta, for_all
from pagoda.errors import InvalidRequestError
from pagoda.frontend.async_utils import merge
from pagoda.frontend.request_tracker import ClientRequest
from pagoda.frontend.text_generator import TextDelta, TextGenerator, TextRequest
from pagoda.messages.frontend import TokenLogprobs


async def completions(context: RequestContext) -> web.StreamResponse:
    """Completes text, in one piece or as a stream."""
    body = await context.parse(CompletionRequest)
    generator = context.service.admit(body.model)
    session = session_of(body, context.session_header)
    role, is_router = generator.endpoint.limits.role, context.service.is_router
    handoff = handoff_of(body, role, is_router=is_router)
    model = context.service.config.served_model_name
    job = await _prepare(body, generator, model, session, handoff, context.client_request)
    if body.stream:
        return await context.stream(job.stream)
    return context.json(await job.whole())


async def _prepare(
    body: CompletionRequest,
    generator: TextGenerator,
    model: str,
    session: str | None,
    handoff: Handoff,
    client_request: ClientRequest,
) -> _Job:
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError("echo together with logprobs is not supported yet.", param="echo")
    prompts = prompts_of(body)
    if handoff != Handoff() and len(prompts) != 1:
        raise InvalidRequestError(
            "prompt must be a single one with kv_transfer_params.", param="prompt"
        )
    explicit = body.max_tokens is not None
    sampling = sampling_params(
        with_one_token(body, body.max_tokens) if handoff.holds_kv else body,
        max_tokens=body.max_tokens if explicit else DEFAULT_COMPLETION_TOKENS,
        logprobs=body.logprobs,
        defaults=generator.text.default_sampling,
    )
    requests: list[TextRequest] = []
    for prompt in prompts:
        await asyncio.sleep(0)  # a body may hold many prompts; streams go on between them
        requests += await generator.prepare(
            prompt,
            sampling,
            add_special_tokens=body.add_special_tokens is not False,
            clamp_max_tokens=not explicit,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            session=session,
            holds_kv=handoff.holds_kv,
            kv_source=handoff.kv_source,
            client_request=client_request,
        )
    return _Job(body, generator, requests, model)


@dataclass
class _Job:
    """One body's prompts on their way to answers."""

    body: CompletionRequest
    generator: TextGenerator
    requests: Sequence[TextRequest]
    model: str
    last_fields: dict[str, Any] = field(default_factory=dict)
    """What the last delta adds to the object of the whole answer."""
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": choices,
        }

    def _choice(self, index: int, text: str, delta: TextDelta, logprobs: Any) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        request = self.requests[index]
        if request.prompt is not None:
            return request.prompt
        return self.generator.text.tokenizer.decode(request.request.prompt_token_ids)

    def _logprobs(self) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        return CompletionLogprobs(self.generator.text.tokenizer)

    # ---- in one piece

    async def whole(self) -> dict[str, Any]:
        """The response object."""
        usage = Usage(self.requests)
        indexes = range(len(self.requests))
        choices = await for_all(indexes, lambda index: self._whole_choice(index, usage))
        totals = {"usage": usage.as_dict(self.requests), **self.last_fields}
        return {**self._envelope(choices), **totals}

    async def _whole_choice(self, index: int, usage: Usage) -> dict[str, Any]:
        request = self.requests[index]
        text, token_ids = [self._echo(index)], list[int]()
        entries: list[TokenLogprobs] = []
        delta = TextDelta("", [])
        async with aclosing(self.generator.stream(request)) as deltas:
            async for delta in deltas:
                check_delta(delta, request)
                usage.add(index, delta)
                text.append(delta.text)
                token_ids += delta.token_ids
                entries += delta.logprobs or ()
                self.last_fields |= transfer_fields(delta)
        formatter = self._logprobs()
        logprobs = formatter.format(token_ids, entries) if formatter else None
        choice = self._choice(index, "".join(text), delta, logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = request.request.prompt_token_ids
        return choice

    # ---- as a stream

    async def stream(self, stream: EventStream) -> None:
        """Sends one event per delta, the usage if asked for, and the end mark."""
        usage = Usage(self.requests)
        options = self.body.stream_options
        formats = [self._event_format(index, usage) for index in range(len(self.requests))]
        if self.body.echo:
            for index in range(len(self.requests)):
                await stream.send(formats[index](TextDelta(self._echo(index), [])))
        streams = [self.generator.stream(request) for request in self.requests]
        async with aclosing(merge(streams)) as deltas:
            async for index, delta in deltas:
                check_delta(delta, self.requests[index])
                usage.add(index, delta)
                await stream.send(formats[index](delta))
        if options is not None and options.include_usage:
            total = usage.as_dict(self.requests)
            await stream.send(event({**self._envelope([]), "usage": total}))
        await stream.send(DONE)

    def _event_format(self, index: int, usage: Usage) -> Callable[[TextDelta], bytes]:
        """How the deltas of one answer become events."""
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        formatter = self._logprobs()
        blank: dict[str, Any] = {"usage": None} if with_usage else {}
        plain = TextDelta("", [])
        template = EventTemplate(
            {**self._envelope([self._choice(index, EventTemplate.PLACE, plain, None)]), **blank}
        )
        simple = not (continuous or formatter or self.body.return_token_ids)
        first = True

        def format_delta(delta: TextDelta) -> bytes:
            nonlocal first
            if simple and delta.finish_reason is None:
                return template.fill(delta.text)
            logprobs = None
            if formatter is not None and delta.logprobs is not None:
                logprobs = formatter.format(delta.token_ids, delta.logprobs)
            choice = self._choice(index, delta.text, delta, logprobs)
            if first and self.body.return_token_ids:
                choice["prompt_token_ids"] = self.requests[index].request.prompt_token_ids
            first = False
            tail = {"usage": usage.as_dict(self.requests)} if continuous else blank
            transfer = transfer_fields(delta)
            return event({**self._envelope([choice]), **tail, **transfer})

        return format_delta
