# SPDX-License-Identifier: Apache-2.0
"""Tokens in, tokens out: `POST /inference/v1/generate`, and the routes that render its bodies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.answers.conversation import begin_conversation
from pagoda.api.answers.generation import ANSWER_CHARS, AnswerShape, Generation
from pagoda.api.bodies.body import Timeout, convert_body
from pagoda.api.bodies.fields import KVTransferParams, StreamOptions, TokenIds, renamed
from pagoda.api.http.request_context import RequestContext
from pagoda.api.http.sse import DONE, event
from pagoda.api.openai.bodies import ChatRequest, CompletionRequest
from pagoda.api.openai.completions import begin_completion
from pagoda.api.openai.logprobs import TokenSpelling, chat_entries, encoded_entry
from pagoda.errors import refuse
from pagoda.text.text_generator import TextDelta, TextRequest, joined_deltas

_NEUTRAL_SAMPLING: dict[str, tuple[object, ...]] = {
    "detokenize": (True, False),
    "output_kind": (0, 1, 2),
    "skip_clone": (True, False),
    "extra_args": ({},),
}
"""Fields of vLLM's sampling parameters that change no tokens, with their values."""


class TokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /inference/v1/generate`."""

    token_ids: TokenIds
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    timeout: Timeout | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    kv_transfer_params: KVTransferParams | None = None
    features: None = None
    """Inputs other than text, which this server does not take."""


class _TokensAnswer:
    """The tokens of one answer."""

    is_complete = False

    def __init__(self, generation: Generation, index: int, request_id: str) -> None:
        self._index = index
        self._request_id = request_id
        self._spelling = TokenSpelling(generation.generator.text.tokenizer)
        self._num_top = generation.requests[index].sampling.logprobs
        self._deltas: list[TextDelta] = []

    def add(self, delta: TextDelta) -> None:
        self._deltas.append(delta)

    def choice(self, delta: TextDelta | None = None) -> dict[str, Any]:
        """The choice of a delta; of the whole answer without one."""
        delta = joined_deltas(self._deltas) if delta is None else delta
        logprobs = None
        if self._num_top is not None and delta.logprobs:
            content = []
            for entry in chat_entries(self._spelling, delta.token_ids, delta.logprobs):
                entry["top_logprobs"] = entry["top_logprobs"] or [
                    {name: value for name, value in entry.items() if name != "top_logprobs"}
                ]
                content.append(encoded_entry(entry))
            logprobs = {"content": content}
        return {
            "index": self._index,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "token_ids": delta.token_ids,
        }

    def events(self, delta: TextDelta) -> bytes:
        if not delta.token_ids and delta.finish_reason is None:
            return b""
        return event({"request_id": self._request_id, "choices": [self.choice(delta)]})


class _TokensShape:
    """The response to a body: token ids alone."""

    def __init__(self, generation: Generation, request_id: str) -> None:
        indices = range(len(generation.requests))
        self._answers = [_TokensAnswer(generation, index, request_id) for index in indices]
        self.answers: Sequence[AnswerShape] = self._answers
        self._request_id = request_id

    def whole(self) -> dict[str, Any]:
        choices = [answer.choice() for answer in self._answers]
        return {"request_id": self._request_id, "choices": choices, "prompt_logprobs": None}

    def end(self) -> bytes:
        return DONE


async def generate_tokens(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(TokensBody)
    sampling = _sampling_fields(body.sampling_params)
    fields = {
        **sampling,
        "prompt": body.token_ids,
        "model": body.model,
        "stream": body.stream,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "kv_transfer_params": body.kv_transfer_params,
    }
    names = {name: f"sampling_params.{name}" for name in sampling}
    with renamed({**names, "prompt": "token_ids"}):
        work = partial(convert_body, fields, CompletionRequest, context.ignored)
        request = await context.caller.translate(work)
        generation, _ = await begin_completion(context.caller, request)
    shape = _TokensShape(generation, body.request_id or f"generate-tokens-{context.request_id}")
    return await generation.respond(context, shape, streams=bool(body.stream))


def _sampling_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of `sampling_params` that change tokens.
    Raises InvalidRequestError: stop strings are to be found in an answer without text."""
    if given.get("detokenize") is False and given.get("stop"):
        refuse("sampling_params.stop", "needs detokenize: true, as stop strings are text")
    kept = {}
    for name, value in given.items():
        if value is None or value in _NEUTRAL_SAMPLING.get(name, ()):
            continue
        if name in ("prompt", "model", "stream", "stream_options"):
            refuse(f"sampling_params.{name}", "is a field of the body")
        kept[name] = value
    return kept


# ---- bodies for it


async def render_chat(context: RequestContext) -> web.StreamResponse:
    """The tokens of a conversation, as a body for `/inference/v1/generate`."""
    body = await context.parse(ChatRequest)
    conversation = await begin_conversation(context.caller, body)
    first = conversation.generation.requests[0]
    return context.json(_rendered(context, body, first, f"chatcmpl-{context.request_id}"))


async def render_completion(context: RequestContext) -> web.StreamResponse:
    """The tokens of each prompt, as bodies for `/inference/v1/generate`."""
    body = await context.parse(CompletionRequest)
    generation, _ = await begin_completion(context.caller, body)
    first = [request for request in generation.requests if request.index == 0]
    name = f"cmpl-{context.request_id}"

    def rendered() -> list[dict[str, Any]]:
        return [_rendered(context, body, request, f"{name}-{i}") for i, request in enumerate(first)]

    more = len(first) * (ANSWER_CHARS + _num_listed(first[0]))
    size = generation.usage.num_prompt_tokens + more
    return await context.sized_json(await context.caller.translate(rendered, more), size)


def _num_listed(request: TextRequest) -> int:
    """Tokens in the lists of a request's sampling."""
    sampling = request.sampling
    lists = (sampling.logit_bias, sampling.allowed_token_ids, sampling.stop_token_ids)
    return sum(len(one) for one in lists if one)


def _rendered(
    context: RequestContext, body: ChatRequest | CompletionRequest, request: TextRequest, name: str
) -> dict[str, Any]:
    sampling = msgspec.to_builtins(
        msgspec.structs.replace(
            request.sampling, max_tokens=request.request.work.sampling.max_tokens
        ),
        str_keys=True,
    )
    return {
        "request_id": name,
        "token_ids": request.prompt_token_ids,
        "features": None,
        "sampling_params": sampling,
        "model": body.model or context.service.config.served_model_name,
        "stream": bool(body.stream),
        "stream_options": body.stream_options,
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "kv_transfer_params": body.kv_transfer_params,
    }
