"""The answers to one body, in one piece or as a stream of events. Each route gives answers a shape of its own."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from pagoda.api.kv_transfer import Handoff, handoff_of, transfer_fields
from pagoda.api.protocol import GenerationFields, sampling_params, session_of
from pagoda.api.request_context import RequestContext
from pagoda.api.sse import DONE, EventStream, EventTemplate, event
from pagoda.errors import refuse
from pagoda.frontend.async_utils import gather_all
from pagoda.frontend.text_generator import TextDelta, TextGenerator, TextRequest
from pagoda.version import __version__

Prompt = str | Sequence[int]


class GenerationError(Exception):
    """The engine failed with one request. The text is for the log, not for the client."""


class Answer:
    """One answer of a `Job`: a choice in one piece, or the choices of its events."""

    def __init__(self, job: Job, index: int, *, has_logprobs: bool) -> None:
        self.is_complete = False
        """No further delta is wanted, even if the engine has not finished."""
        self._job = job
        self._index = index
        self._request = job.requests[index].request
        self._has_logprobs = has_logprobs
        self._deltas: list[TextDelta] = []
        self._has_begun = False
        has_more = has_logprobs or job.return_token_ids or job.sends_continuous_usage
        self._is_simple = not has_more
        """Events differ in their text alone, but for the first and the last one."""

    def _choice_with(
        self, content: dict[str, Any], delta: TextDelta, logprobs: object = None
    ) -> dict[str, Any]:
        choice = {
            "index": self._index,
            **content,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._job.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def add(self, delta: TextDelta) -> None:
        """Adds a delta to the choice."""
        self._deltas.append(delta)

    def choice(self) -> dict[str, Any]:
        """The element of `choices` in a response in one piece."""
        raise NotImplementedError

    def events(self, delta: TextDelta) -> bytes:
        """The events of a delta in a stream; empty if the client sees nothing of the delta."""
        raise NotImplementedError


class Job:
    """One body on its way to its answers."""

    def __init__(
        self,
        context: RequestContext,
        body: GenerationFields,
        generator: TextGenerator,
        requests: Sequence[TextRequest],
        *,
        id_prefix: str,
        kind: str,
        chunk_kind: str,
    ) -> None:
        """`kind` and `chunk_kind` are the `object` of a response in one piece and of an event."""
        self.generator = generator
        self.requests = requests
        self.return_token_ids = bool(body.return_token_ids)
        self.extra: dict[str, Any] = {}
        """Fields that a response in one piece has besides the usual ones."""
        self._context = context
        self._streams = bool(body.stream)
        options = body.stream_options
        self._sends_usage = options is not None and bool(options.include_usage)
        self.sends_continuous_usage = options is not None and bool(options.continuous_usage_stats)
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._cached_by_answer: dict[int, int] = {}
        prompts = [r.request.prompt_token_ids for r in requests if r.index == 0]
        self._num_prompt_tokens = sum(map(len, prompts))
        self._envelope = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": chunk_kind if self._streams else kind,
            "created": int(time.time()),
            "model": context.service.config.served_model_name,
            "system_fingerprint": f"pagoda-{__version__}",
        }

    async def respond(self, make_answer: Callable[[int], Answer]) -> web.StreamResponse:
        """The response; `make_answer` makes the answer of each index of `requests`."""
        answers = [make_answer(index) for index in range(len(self.requests))]
        if self._streams:
            return await self._context.stream(lambda stream: self._stream(answers, stream))
        await gather_all([self._run(index, answer) for index, answer in enumerate(answers)])
        choices = [answer.choice() for answer in answers]
        return self._context.json(self.envelope(choices, usage=self.usage(), **self.extra))

    def envelope(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {**self._envelope, "choices": choices, **fields}

    def event(self, choice: dict[str, Any], delta: TextDelta | None = None, **fields: Any) -> bytes:
        """An event with one choice. With a `delta`, usage and transfer parameters go with it."""
        if self._sends_usage:
            fields["usage"] = None
        if delta is not None:
            if self.sends_continuous_usage:
                fields["usage"] = self.usage()
            fields.update(transfer_fields(delta))
        return event(self.envelope([choice], **fields))

    def template(self, choice: dict[str, Any]) -> EventTemplate:
        """The event with one choice, in which `EventTemplate.PLACE` stands for a text to be filled in."""
        return EventTemplate(self.event(choice))

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }

    def _count(self, index: int, delta: TextDelta) -> None:
        if delta.error is not None:
            request_id = self.requests[index].request.request_id
            raise GenerationError(f"{request_id}: {delta.error}")
        self._num_completion_tokens += len(delta.token_ids)
        num_cached = delta.num_cached_tokens
        if num_cached and self.requests[index].index == 0:
            self._num_cached_tokens += num_cached - self._cached_by_answer.get(index, 0)
            self._cached_by_answer[index] = num_cached

    async def _run(self, index: int, answer: Answer, stream: EventStream | None = None) -> None:
        """Brings one answer to its end: as events to `stream`, or without one as a choice."""
        async with aclosing(self.generator.stream(self.requests[index])) as deltas:
            async for delta in deltas:
                self._count(index, delta)
                if stream is None:
                    answer.add(delta)
                    self.extra |= transfer_fields(delta)
                elif not stream.write(answer.events(delta)):
                    await stream.flush()
                if answer.is_complete:
                    break

    async def _stream(self, answers: Sequence[Answer], stream: EventStream) -> None:
        await gather_all([self._run(index, answer, stream) for index, answer in enumerate(answers)])
        if self._sends_usage:
            await stream.send(event(self.envelope([], usage=self.usage())))
        await stream.send(DONE)


async def prepare(
    context: RequestContext,
    body: GenerationFields,
    generator: TextGenerator,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    add_special_tokens: bool,
    clamp_max_tokens: bool = False,
    param: str = "prompt",
) -> list[TextRequest]:
    """The requests of all prompts of a body; `param` is the field of the prompt.
    Raises InvalidRequestError: a value is not as it must be; names the field."""
    handoff = handoff_of(body, generator.endpoint.limits.role, is_router=context.service.is_router)
    if handoff != Handoff() and len(prompts) != 1:
        refuse("prompt", "must be a single prompt with kv_transfer_params")
    fields = {"max_tokens": max_tokens, "logprobs": logprobs}
    if handoff.holds_kv and body.min_tokens is not None and max_tokens is not None:
        # Proxies ask the prefill server for one token, whatever `min_tokens` their client has sent.
        fields["min_tokens"] = min(body.min_tokens, max_tokens)
    sampling = generator.check_sampling(
        sampling_params(body, generator.text.default_sampling, fields)
    )
    requests: list[TextRequest] = []
    for prompt in prompts:
        await asyncio.sleep(0)  # other streams go on between the prompts of a long list
        requests += await generator.prepare(
            prompt,
            sampling,
            param=param,
            add_special_tokens=add_special_tokens,
            clamp_max_tokens=clamp_max_tokens,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            session=session_of(body, context.http.headers.get("X-Session-ID")),
            holds_kv=handoff.holds_kv,
            kv_source=handoff.kv_source,
            client_request=context.client_request,
        )
    return requests
