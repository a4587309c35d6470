"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagoda.api.generation import Answer, Job, prepare
from pagoda.api.logprobs import CompletionLogprobs
from pagoda.api.protocol import DEFAULT_COMPLETION_TOKENS, CompletionRequest, prompts_of
from pagoda.api.request_context import RequestContext
from pagoda.api.sse import EventTemplate
from pagoda.errors import refuse
from pagoda.frontend.text_generator import TextDelta, joined_deltas


async def completions(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(CompletionRequest)
    generator = context.service.admit(body.model)
    if body.echo and body.logprobs is not None:
        refuse("echo", "together with logprobs is not supported yet")
    is_bounded = body.max_tokens is not None
    requests = await prepare(
        context,
        body,
        generator,
        prompts_of(body),
        max_tokens=body.max_tokens if is_bounded else DEFAULT_COMPLETION_TOKENS,
        logprobs=body.logprobs,
        add_special_tokens=body.add_special_tokens is not False,
        clamp_max_tokens=not is_bounded,
    )
    kind = "text_completion"
    job = Job(context, body, generator, requests, id_prefix="cmpl", kind=kind, chunk_kind=kind)
    return await job.respond(lambda index: _CompletionAnswer(job, index, body))


class _CompletionAnswer(Answer):
    """A text, which is the prompt and its continuation with `echo`."""

    def __init__(self, job: Job, index: int, body: CompletionRequest) -> None:
        super().__init__(job, index, has_logprobs=body.logprobs is not None)
        tokenizer = job.generator.text.tokenizer
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(tokenizer)
        self._template = job.template(self._choice(TextDelta(EventTemplate.PLACE, [])))
        self._prompt = ""
        if body.echo:
            given = job.requests[index].prompt
            ids = self._request.prompt_token_ids
            self._prompt = tokenizer.decode(ids) if given is None else given

    def _choice(self, delta: TextDelta, prompt: str = "") -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None and delta.logprobs is not None:
            logprobs = self._logprobs.format(delta.token_ids, delta.logprobs)
        choice = self._choice_with({"text": prompt + delta.text}, delta, logprobs)
        if self._job.return_token_ids and not self._has_begun:
            choice["prompt_token_ids"] = self._request.prompt_token_ids
        return choice

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
        return self._job.event(choice, delta)
