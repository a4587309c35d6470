"""`POST /v1/completions`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from aiohttp import web

from pagoda.api.generation import Generation, prepare
from pagoda.api.openai.bodies import DEFAULT_COMPLETION_TOKENS, CompletionRequest, prompts_of
from pagoda.api.openai.choices import Choices, Envelope
from pagoda.api.openai.logprobs import CompletionLogprobs
from pagoda.api.request_context import Caller, RequestContext
from pagoda.api.sse import EventTemplate
from pagoda.errors import refuse
from pagoda.frontend.text_generator import TextDelta, joined_deltas


async def completions(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(CompletionRequest)
    generation, shape = await begin_completion(context.caller, body)
    return await generation.respond(context, shape, streams=bool(body.stream))


async def begin_completion(caller: Caller, body: CompletionRequest) -> tuple[Generation, Choices]:
    """Prepares the answers to a body, and their shape.
    Raises InvalidRequestError: a value is not as it must be; names the field. ApiError: as `Service.admit`."""
    generator = caller.service.admit(body.model)
    if body.echo and body.logprobs is not None:
        refuse("echo", "together with logprobs is not supported yet")
    is_bounded = body.max_tokens is not None
    generation = await prepare(
        caller,
        body,
        generator,
        prompts_of(body),
        max_tokens=body.max_tokens if is_bounded else DEFAULT_COMPLETION_TOKENS,
        logprobs=body.logprobs,
        add_special_tokens=body.add_special_tokens is not False,
        clamp_max_tokens=not is_bounded,
    )
    envelope = Envelope(
        body,
        generation,
        model=caller.service.config.served_model_name,
        id_prefix="cmpl",
        kind="text_completion",
        always_usage=caller.service.config.always_usage,
    )
    indices = range(len(generation.requests))
    answers = [_CompletionAnswer(envelope, generation, index, body) for index in indices]
    return generation, Choices(envelope, answers)


class _CompletionAnswer:
    """A text, which is the prompt and its continuation with `echo`."""

    def __init__(
        self, envelope: Envelope, generation: Generation, index: int, body: CompletionRequest
    ) -> None:
        self.is_complete = False
        self._envelope = envelope
        self._index = index
        self._prompt_token_ids = generation.requests[index].request.prompt_token_ids
        self._has_begun = False
        self._deltas: list[TextDelta] = []
        tokenizer = generation.generator.text.tokenizer
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(tokenizer)
        has_more = envelope.return_token_ids or envelope.sends_continuous_usage
        self._is_simple = self._logprobs is None and not has_more
        """Events differ in their text alone, but for the first and the last one."""
        self._prompt = ""
        if body.echo:
            given = generation.requests[index].prompt
            self._prompt = tokenizer.decode(self._prompt_token_ids) if given is None else given

    @cached_property
    def _template(self) -> EventTemplate:
        return self._envelope.template(self._choice(TextDelta(EventTemplate.PLACE, [])))

    def _choice(self, delta: TextDelta, prompt: str = "") -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None and delta.logprobs is not None:
            logprobs = self._logprobs.format(delta.token_ids, delta.logprobs)
        text = {"text": prompt + delta.text}
        choice = self._envelope.choice(self._index, text, delta, logprobs)
        if self._envelope.return_token_ids and not self._has_begun:
            choice["prompt_token_ids"] = self._prompt_token_ids
        return choice

    def add(self, delta: TextDelta) -> None:
        self._deltas.append(delta)

    def choice(self) -> dict[str, Any]:
        return self._choice(joined_deltas(self._deltas), self._prompt)

    def events(self, delta: TextDelta) -> bytes:
        if self._has_begun and self._is_simple and delta.finish_reason is None:
            return self._template.fill(delta.text)
        before = b""
        if not self._has_begun and self._prompt:
            before = self._event(TextDelta(self._prompt, []))
        return before + self._event(delta)

    def _event(self, delta: TextDelta) -> bytes:
        choice = self._choice(delta)
        self._has_begun = True
        return self._envelope.event(choice, delta)
