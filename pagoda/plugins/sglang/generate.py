# SPDX-License-Identifier: Apache-2.0
"""`POST /generate` as SGLang has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from pagoda.api.answers.generation import Generation
from pagoda.api.bodies.body import convert_body
from pagoda.api.bodies.fields import renamed
from pagoda.api.bodies.list_shape import ListShape
from pagoda.api.http.request_context import RequestContext
from pagoda.api.http.sse import DONE, event
from pagoda.api.http.timing import times_of
from pagoda.api.openai.bodies import MAX_SEQUENCES_PER_BODY, CompletionRequest
from pagoda.api.openai.choices import matched_stop
from pagoda.api.openai.completions import begin_completion
from pagoda.errors import refuse
from pagoda.messages.frontend import FinishReason, TokenLogprobs
from pagoda.plugins.sglang.bodies import (
    NAMES,
    GenerateBody,
    PromptRequest,
    asked_of,
    is_list,
    prompts_of,
)
from pagoda.text.text_generator import TextDelta, TextGenerator, TextRequest
from pagoda.text.tokenizers.tokenizer import Tokenizer

_GROWTH = 256
"""An event of a stream repeats the answer from its beginning. Events come so seldom that each has at least one
new token for so many old ones; so a stream takes time in proportion to its length."""
_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


async def generate(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(GenerateBody)
    if body.model is not None and body.lora_path is not None:
        refuse("lora_path", "and model both name what answers; give one")
    model = body.model if body.lora_path is None else body.lora_path
    with renamed({"model": "lora_path"} if body.lora_path is not None else {}):
        generator = context.service.admit(model, context.client_request)
    token_ids = await prompts_of(body, generator)
    prompts = await context.caller.translate(partial(asked_of, body, token_ids))
    wanted = [one.sampling.get("n") for one in prompts]
    total = sum(n if isinstance(n, int) else 1 for n in wanted)
    if total > MAX_SEQUENCES_PER_BODY:
        rule = f"asks for {total} answers in one body; at most {MAX_SEQUENCES_PER_BODY} are served"
        refuse("sampling_params.n", rule)
    requests: list[TextRequest] = []
    asked: list[PromptRequest] = []
    param = "text" if body.input_ids is None else "input_ids"
    for one in prompts:
        with renamed({**NAMES, "prompt": param}):
            fields = _fields(body, one, model, generator)
            work = partial(convert_body, fields, CompletionRequest, context.ignored)
            begun, _ = await begin_completion(context.caller, await context.caller.translate(work))
        requests += begun.requests
        asked += [one] * len(begun.requests)
    generation = Generation(generator, requests)
    several = is_list(body) or len(requests) > 1
    answers = [
        _GenerateAnswer(generation, index, one, is_listed=several)
        for index, one in enumerate(asked)
    ]
    if not body.stream:
        for answer, request in zip(answers, requests, strict=True):
            answer.first = answers[answer.index - request.index]
    shape = ListShape(answers, is_list=several, end=DONE)
    return await generation.respond(context, shape, streams=bool(body.stream))


def _fields(
    body: GenerateBody, one: PromptRequest, model: str | None, generator: TextGenerator
) -> dict[str, Any]:
    """The body of a completion for one prompt.
    Raises InvalidRequestError: of a prompt that an encoder reads, more is wanted than an answer."""
    scores = one.num_top if one.start >= 0 else None
    if generator.text.decoder is not None:
        if scores is not None:
            refuse("logprob_start_len", "is not given of a prompt that the model's encoder reads")
        if not one.sampling["max_tokens"]:
            rule = "must be at least 1 for a model whose encoder reads the prompt, got 0"
            refuse("max_tokens", rule)
    max_tokens = min(one.sampling["max_tokens"], generator.room(one.token_ids))
    if max_tokens == 0 and scores is None:
        scores = 0  # a prompt that is only computed
    return {
        **one.sampling,
        "max_tokens": max_tokens,
        "prompt": one.token_ids,
        "model": model,
        "stream": body.stream,
        "logprobs": one.num_top if one.with_logprobs else None,
        "prompt_logprobs": scores,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "bootstrap_host": body.bootstrap_host,
        "bootstrap_port": body.bootstrap_port,
        "bootstrap_room": body.bootstrap_room,
    }


class _GenerateAnswer:
    """One answer, told from its beginning in every event."""

    is_complete = False

    def __init__(
        self, generation: Generation, index: int, asked: PromptRequest, *, is_listed: bool
    ) -> None:
        self.index = index
        self.first = self
        """The answer to the same prompt that its log-probabilities come with."""
        self._generation = generation
        self._asked = asked
        self._is_listed = is_listed
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.scores: list[TokenLogprobs] | None = None
        """Log-probabilities of the prompt, once they are there."""
        self._num_cached_tokens = 0
        self._num_told = 0
        self._last: TextDelta | None = None
        self._e2e_ns = 0

    def add(self, delta: TextDelta) -> None:
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        self.scores = delta.prompt_logprobs or self.scores
        self._num_cached_tokens = delta.num_cached_tokens or self._num_cached_tokens
        if delta.finish_reason is not None:
            self._last = delta
            self._e2e_ns = times_of(self._generation, self.index).total_ns

    def events(self, delta: TextDelta) -> bytes:
        self.add(delta)
        count = len(self._token_ids)
        wanted = max(self._asked.stream_interval, self._num_told // _GROWTH)
        if self._last is None and (
            not count or (self._num_told and count - self._num_told < wanted)
        ):
            return b""
        self._num_told = count
        index = {"index": self.index} if self._is_listed else {}
        return event({**self.whole(), **index})

    def whole(self) -> dict[str, Any]:
        """The answer so far."""
        request = self._generation.requests[self.index]
        meta: dict[str, Any] = {
            "id": self._asked.rid or request.request.request_id,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": len(request.prompt_token_ids),
            "completion_tokens": len(self._token_ids),
            "cached_tokens": self._num_cached_tokens,
            "weight_version": "default",
        }
        if self._asked.with_logprobs:
            meta |= self._logprob_fields()
        if self._last is not None:
            meta["e2e_latency"] = self._e2e_ns / 1e9
        return {"text": "".join(self._text), "output_ids": self._token_ids, "meta_info": meta}

    def _finish_reason(self) -> dict[str, Any] | None:
        if self._last is None:
            return None
        match self._last.finish_reason:
            case FinishReason.STOP:
                return {"type": "stop", "matched": matched_stop(self._last)}
            case FinishReason.LENGTH:
                return {"type": "length", "length": len(self._token_ids)}
        return {"type": "abort", "message": "The request was ended before its answer was complete."}

    def _logprob_fields(self) -> dict[str, Any]:
        asked = self._asked
        tokenizer = self._generation.generator.text.tokenizer if asked.with_text else None
        ids: Sequence[int] = asked.token_ids[asked.start :] if asked.start >= 0 else ()
        scores = (self.first.scores or [])[asked.start :] if ids else []
        # Nothing is known of the first of the tokens: the log-probabilities are those of what comes behind it.
        known = [None, *scores] if ids and len(scores) == len(ids) - 1 else [None] * len(ids)
        fields: dict[str, Any] = {
            "input_token_logprobs": _tokens(ids, known, tokenizer),
            "output_token_logprobs": _tokens(self._token_ids, self._logprobs, tokenizer),
        }
        if asked.num_top:
            fields["input_top_logprobs"] = _tops(known, asked.num_top, tokenizer)
            fields["output_top_logprobs"] = _tops(self._logprobs, asked.num_top, tokenizer)
        return fields


def _triple(logprob: float | None, token_id: int, tokenizer: Tokenizer | None) -> list[Any]:
    text = None
    if tokenizer is not None:
        text = tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
    return [None if logprob is None else max(logprob, _FLOOR), token_id, text]


def _tokens(
    token_ids: Iterable[int], entries: Iterable[TokenLogprobs | None], tokenizer: Tokenizer | None
) -> list[list[Any]]:
    """Log-probability, id and text of each token."""
    return [
        _triple(None if entry is None else entry.logprob, token_id, tokenizer)
        for token_id, entry in zip(token_ids, entries, strict=False)
    ]


def _tops(
    entries: Iterable[TokenLogprobs | None], num_top: int, tokenizer: Tokenizer | None
) -> list[list[list[Any]] | None]:
    """The likeliest tokens at each position."""
    tops: list[list[list[Any]] | None] = []
    for entry in entries:
        if entry is None:
            tops.append(None)
            continue
        pairs = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]
        tops.append([_triple(logprob, i, tokenizer) for i, logprob in pairs])
    return tops
