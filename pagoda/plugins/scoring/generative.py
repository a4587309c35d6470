# SPDX-License-Identifier: Apache-2.0
"""`POST /generative_scoring` as vLLM has it: how likely labels are behind a query and each of several items."""

from __future__ import annotations

import math
from contextlib import aclosing
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from pagoda.api.bodies.body import Timeout
from pagoda.api.bodies.fields import TokenIds
from pagoda.api.errors import GenerationError
from pagoda.api.http.request_context import RequestContext
from pagoda.concurrency.async_utils import gather_all
from pagoda.errors import refuse
from pagoda.messages.sampling_params import SamplingParams, TokenId
from pagoda.plugins.scoring.embeddings import envelope
from pagoda.text.draft import Draft
from pagoda.text.text_generator import TextGenerator, TextRequest

MAX_LABELS = 16
MAX_SCORES = 1024
"""Most pairs of an item and a label in one body."""


class GenerativeScoringRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    query: str | TokenIds
    items: Annotated[list[str | TokenIds], Meta(max_length=MAX_SCORES)]
    label_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LABELS)]
    """Tokens that may come next; the score is that of the first one."""
    model: str | None = None
    timeout: Timeout | None = None
    user: str | None = None
    apply_softmax: bool | None = None
    """False gives the probability among all tokens, else among the labels."""
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


async def generative_scoring(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(GenerativeScoringRequest)
    generator = context.service.admit(body.model, context.client_request)
    labels = body.label_token_ids
    vocab_size = generator.endpoint.limits.vocab_size
    if not body.items:
        refuse("items", "is an empty list")
    if not labels or max(labels) >= vocab_size:
        refuse("label_token_ids", f"must name one or more tokens below {vocab_size}")
    if len(body.items) * len(labels) > MAX_SCORES:
        refuse("items", f"times label_token_ids must be at most {MAX_SCORES}")
    requests: list[TextRequest] = []
    num_prompt_tokens = 0
    for item in body.items:
        prompt = await _prompt(generator, body, item)
        num_prompt_tokens += len(prompt)
        requests += [await _request(context, generator, body, prompt, label) for label in labels]
    logprobs = await gather_all([_logprob(generator, request) for request in requests])
    data = []
    for index in range(len(body.items)):
        own = logprobs[index * len(labels) : (index + 1) * len(labels)]
        score = math.exp(own[0])
        if body.apply_softmax is not False:
            highest = max(own)
            weights = [math.exp(one - highest) for one in own]
            score = weights[0] / sum(weights)
        data.append({"index": index, "object": "score", "score": score})
    num_items = len(body.items)
    usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_items,
        "total_tokens": num_prompt_tokens + num_items,
    }
    own_fields = envelope(context.service, generator, "generative-scoring")
    return context.json({**own_fields, "object": "list", "data": data, "usage": usage})


async def _prompt(
    generator: TextGenerator, body: GenerativeScoringRequest, item: str | list[int]
) -> list[int]:
    parts = [("items", item), ("query", body.query)]
    if not body.item_first:
        parts.reverse()
    token_ids: list[int] = []
    for index, (param, part) in enumerate(parts):
        if isinstance(part, str):
            special = index == 0 and body.add_special_tokens is not False
            part = await generator.encode(part, add_special_tokens=special, param=param)
        token_ids += part
    if not token_ids:
        refuse("query", "and an item are empty together")
    return token_ids


async def _request(
    context: RequestContext,
    generator: TextGenerator,
    body: GenerativeScoringRequest,
    prompt: list[int],
    label: int,
) -> TextRequest:
    """A request that scores the label behind the prompt, and nothing else of it."""
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=0, prompt_logprobs=0)
    [request] = await generator.prepare(
        [*prompt, label],
        sampling,
        Draft(
            param="query",
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            num_scored_tokens=len(prompt),
            client_request=context.client_request,
        ),
    )
    return request


async def _logprob(generator: TextGenerator, request: TextRequest) -> float:
    async with aclosing(generator.stream(request)) as deltas:
        async for delta in deltas:
            if delta.error is not None:
                raise GenerationError(f"{request.request.request_id}: {delta.error}")
            if delta.prompt_logprobs:
                return delta.prompt_logprobs[-1].logprob
    raise GenerationError(f"{request.request.request_id}: it was aborted.")
