# SPDX-License-Identifier: Apache-2.0
"""`POST /api/embed`, and `POST /api/embeddings`, its older form for one text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from pagoda.api.bodies.body import Timeout
from pagoda.api.bodies.vectors import MAX_INPUTS, encoded_vectors
from pagoda.api.http.request_context import RequestContext
from pagoda.plugins.ollama.bodies import Options, check_options
from pagoda.plugins.ollama.names import served_name
from pagoda.text.embeddings import Embedding, EmbeddingOptions, embed


class EmbedFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both bodies have in common."""

    model: str
    timeout: Timeout | None = None
    keep_alive: str | float | None = None
    """Time for which the model stays loaded, which is always."""
    options: Options | None = None
    """Sampling and settings of an engine, which do not change a vector."""


class EmbedBody(EmbedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/embed`."""

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]
    truncate: bool | None = None
    """False refuses texts that are longer than the context; else they are cut."""
    dimensions: Annotated[int, Meta(ge=1, lt=2**31)] | None = None


class EmbeddingsBody(EmbedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/embeddings`."""

    prompt: str


async def embed_texts(context: RequestContext) -> web.StreamResponse:
    """The vectors of texts, of length 1."""
    body = await context.parse(EmbedBody)
    texts = [body.input] if isinstance(body.input, str) else body.input
    cut = None if body.truncate is False else -1
    options = EmbeddingOptions(
        normalize=True, dimensions=body.dimensions, truncate_prompt_tokens=cut
    )
    found = await _embed(context, body, texts, options, "input")
    tracker = context.service.tracker
    answer: dict[str, Any] = {
        "model": body.model,
        "embeddings": await encoded_vectors(found, array.tolist),
        "total_duration": tracker.clock_ns() - context.client_request.arrived_ns,
        "load_duration": 0,
        "prompt_eval_count": sum(one.num_tokens for one in found),
    }
    return context.json(answer)


async def embed_prompt(context: RequestContext) -> web.StreamResponse:
    """The vector of one text as the model has it; an empty list for an empty text."""
    body = await context.parse(EmbeddingsBody)
    texts = [body.prompt] if body.prompt else []
    options = EmbeddingOptions(normalize=False, truncate_prompt_tokens=-1)
    found = await _embed(context, body, texts, options, "prompt")
    return context.json({"embedding": found[0].vector.tolist() if found else []})


async def _embed(
    context: RequestContext,
    body: EmbedFields,
    texts: Sequence[str],
    options: EmbeddingOptions,
    param: str,
) -> list[Embedding]:
    generator = context.service.admit(
        served_name(context.service, body.model), context.client_request
    )
    if body.options is not None:
        check_options(body.options, generator.endpoint.limits.max_model_len, context.ignored)
    return await embed(
        generator, texts, options, param=param, client_request=context.client_request
    )
