# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.answers.generation import Generation, Prompt, Shape, prepare
from pagoda.api.bodies.fields import MAX_TOKEN_IDS
from pagoda.api.http.request_context import Caller, RequestContext
from pagoda.api.http.sse import EventTemplate
from pagoda.api.infill import infill_prompt, require_marks
from pagoda.api.openai.bodies import DEFAULT_COMPLETION_TOKENS, CompletionRequest, prompts_of
from pagoda.api.openai.choices import Choices, Envelope
from pagoda.api.openai.logprobs import CompletionLogprobs, TokenSpelling, prompt_logprobs
from pagoda.errors import refuse
from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.sampling_params import ALL_LOGPROBS, MAX_TOKEN_LIST
from pagoda.text.draft import Draft
from pagoda.text.text_generator import TextDelta, TextGenerator, TextRequest, joined_deltas


async def completions(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(CompletionRequest)
    generation, shape = await begin_completion(context.caller, body)
    return await generation.respond(context, shape, streams=bool(body.stream))


async def begin_completion(
    caller: Caller,
    body: CompletionRequest,
    *,
    default_tokens: int | None = DEFAULT_COMPLETION_TOKENS,
) -> tuple[Generation, Shape]:
    """Prepares the answers to a body, and their shape; `default_tokens` bounds those of a body that does not say
    how long they are, and None lets them be as long as the context.
    Raises InvalidRequestError: a value is not as it must be; names the field. ApiError: as `Service.admit`."""
    generator = caller.service.admit(body.model, caller.client_request)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        refuse("max_tokens", "must be at least 1 without echo or prompt_logprobs")
    if body.use_beam_search and body.echo and body.logprobs is not None:
        refuse("echo", "does not go together with logprobs and use_beam_search", "not_supported")
    if body.echo and generator.text.decoder is not None:
        refuse("echo", "does not go with a model whose encoder reads the prompt")
    prompts: list[Prompt] = [*prompts_of(body)]
    if body.suffix:
        body, prompts = await _with_gap(body, prompts, generator)
    is_bounded = body.max_tokens is not None
    generation = await prepare(
        caller,
        body,
        generator,
        prompts,
        {
            "max_tokens": body.max_tokens if is_bounded else default_tokens,
            "logprobs": 0 if body.logprobs is None and _is_best_of(body) else body.logprobs,
            "prompt_logprobs": _num_top_of_prompt(body),
        },
        Draft(
            add_special_tokens=body.add_special_tokens is not False,
            clamp_max_tokens=not is_bounded,
        ),
    )
    envelope = Envelope(
        body,
        generation,
        model=caller.service.name_of(generator),
        id_prefix="cmpl",
        kind="text_completion",
        always_usage=caller.service.config.always_usage,
        tells_drafts=caller.service.config.tells_drafts,
        tokens_as_ids=caller.service.config.tokens_as_ids,
    )
    answers: list[_CompletionAnswer] = []
    echo = ""
    for index, request in enumerate(generation.requests):
        if body.echo and request.index == 0:
            echo = await _text_of_prompt(generator, request)
        answers.append(_CompletionAnswer(envelope, generation, index, body, echo))
    if not body.stream:
        for answer, request in zip(answers, generation.requests, strict=True):
            answer.first = answers[answer.index - request.index]
    if _is_best_of(body):
        return generation, _BestOf(envelope, answers, body.n or 1)
    return generation, Choices(envelope, answers)


async def _with_gap(
    body: CompletionRequest, prompts: Sequence[Prompt], generator: TextGenerator
) -> tuple[CompletionRequest, list[Prompt]]:
    """A body whose answers end where the text behind the gap begins, and its prompts for the gap.
    Raises InvalidRequestError: the model does not fill gaps, the body has no text before this one, or the prompts
    are too long together: each has all of the text behind the gap."""
    marks = require_marks(generator.text.tokenizer, "suffix")
    if body.echo:
        refuse("echo", "does not go together with suffix", "not_supported")
    behind = await generator.encode(body.suffix or "", add_special_tokens=False, param="suffix")
    if len(prompts) > 1 and len(prompts) * len(behind) > MAX_TOKEN_IDS:
        refuse("suffix", f"has more than {MAX_TOKEN_IDS} tokens in all prompts together")
    found: list[Prompt] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            refuse("prompt", "must be text with suffix")
        before = await generator.encode(prompt, add_special_tokens=False, param="prompt")
        found.append(await infill_prompt(generator, marks, before, behind))
    stops = [*(body.stop_token_ids or ()), *marks.ends][:MAX_TOKEN_LIST]
    return msgspec.structs.replace(body, stop_token_ids=stops), found


async def _text_of_prompt(generator: TextGenerator, request: TextRequest) -> str:
    if request.prompt is not None:
        return request.prompt
    token_ids = request.prompt_token_ids
    return await generator.run_sized(
        partial(generator.text.tokenizer.decode, token_ids), len(token_ids)
    )


def _is_best_of(body: CompletionRequest) -> bool:
    """True if the likeliest of several answers are wanted."""
    is_several = body.best_of is not None and body.best_of > (body.n or 1)
    return is_several and not body.use_beam_search


class _BestOf:
    """The `n` likeliest answers to each prompt, the likeliest first."""

    def __init__(self, envelope: Envelope, answers: Sequence[_CompletionAnswer], n: int) -> None:
        self.answers = answers
        self._envelope = envelope
        self._n = n

    def whole(self) -> dict[str, Any]:
        chosen: list[_CompletionAnswer] = []
        for _, group in groupby(self.answers, lambda answer: id(answer.first)):
            ranked = sorted(group, key=lambda answer: -answer.cumulative_logprob)
            chosen += ranked[: self._n]
        for index, answer in enumerate(chosen):
            answer.index = index
        return self._envelope.whole([answer.choice() for answer in chosen])

    def end(self) -> bytes:
        return self._envelope.end()


def _num_top_of_prompt(body: CompletionRequest) -> int | None:
    """Likeliest tokens that are wanted at each position of the prompt; None without log-probabilities."""
    both = (body.prompt_logprobs, body.logprobs if body.echo else None)
    wanted = [number for number in both if number is not None]
    return ALL_LOGPROBS if ALL_LOGPROBS in wanted else max(wanted, default=None)


class _CompletionAnswer:
    """A text, which is the prompt and its continuation with `echo`."""

    def __init__(
        self,
        envelope: Envelope,
        generation: Generation,
        index: int,
        body: CompletionRequest,
        prompt: str,
    ) -> None:
        """`prompt` comes in front of the answer; empty without `echo`."""
        self.is_complete = False
        self._envelope = envelope
        self.index = index
        self.first = self
        """The answer to the same prompt that its log-probabilities come with."""
        self._prompt_token_ids = generation.requests[index].prompt_token_ids
        self._has_begun = False
        self._deltas: list[TextDelta] = []
        tokenizer = generation.generator.text.tokenizer
        self._logprobs = None
        sampling = generation.requests[index].sampling
        if sampling.logprobs is not None and body.logprobs is not None:
            spelling = TokenSpelling(tokenizer, as_ids=envelope.tokens_as_ids)
            self._logprobs = CompletionLogprobs(spelling, sampling.logprobs)
        self._tokenizer = tokenizer
        self.scores: list[TokenLogprobs] | None = None
        """Log-probabilities of the prompt, once they are there."""
        self._num_top = None if body.prompt_logprobs is None else sampling.prompt_logprobs
        if self._num_top is not None and body.prompt_logprobs != ALL_LOGPROBS:
            self._num_top = body.prompt_logprobs
        has_more = envelope.return_token_ids or envelope.sends_continuous_usage
        self._is_simple = self._logprobs is None and not has_more
        """Events differ in their text alone, but for the first and the last one."""
        self._prompt = prompt

    @cached_property
    def _template(self) -> EventTemplate:
        return self._envelope.template(self._choice(TextDelta(EventTemplate.PLACE, [])))

    def _choice(self, delta: TextDelta, prompt: str = "") -> dict[str, Any]:
        """The choice with the text of a delta, behind that of the prompt if it is given."""
        logprobs = None
        if self._logprobs is not None and delta.logprobs is not None:
            token_ids: Sequence[int] = delta.token_ids
            entries: Sequence[TokenLogprobs | None] = delta.logprobs
            if prompt and self.first.scores is not None:
                token_ids = [*self._prompt_token_ids, *token_ids]
                entries = [None, *self.first.scores, *entries]
            logprobs = self._logprobs.format(token_ids, entries)
        text = {"text": prompt + delta.text}
        choice = self._envelope.choice(self.index, text, delta, logprobs)
        if not self._has_begun:
            if self._envelope.return_token_ids:
                choice["prompt_token_ids"] = self._prompt_token_ids
            if self._num_top is not None and self.first.scores is not None:
                choice["prompt_logprobs"] = prompt_logprobs(
                    self._tokenizer, self._prompt_token_ids, self.first.scores, self._num_top
                )
        return choice

    @property
    def cumulative_logprob(self) -> float:
        """The sum over the tokens of the answer."""
        return sum(entry.logprob for delta in self._deltas for entry in delta.logprobs or ())

    def add(self, delta: TextDelta) -> None:
        if delta.prompt_logprobs is not None:
            self.scores = delta.prompt_logprobs
        self._deltas.append(delta)

    def choice(self) -> dict[str, Any]:
        # vLLM's clients read these whether they asked for them or not.
        unasked = {"prompt_token_ids": None, "prompt_logprobs": None}
        return unasked | self._choice(joined_deltas(self._deltas), self._prompt)

    def events(self, delta: TextDelta) -> bytes:
        if self._has_begun and self._is_simple and delta.finish_reason is None:
            return self._template.fill(delta.text)
        before = b""
        if not self._has_begun:
            self.scores = delta.prompt_logprobs
            if self._prompt:
                before = self._event(TextDelta("", [], logprobs=[]), self._prompt)
        return before + self._event(delta)

    def _event(self, delta: TextDelta, prompt: str = "") -> bytes:
        choice = self._choice(delta, prompt)
        self._has_begun = True
        return self._envelope.event(choice, delta)
