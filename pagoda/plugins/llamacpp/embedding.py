# SPDX-License-Identifier: Apache-2.0
"""`POST /embedding`: vectors of texts in llama.cpp's form."""

from __future__ import annotations

import math
from array import array
from functools import partial
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from pagoda.api.bodies.body import Timeout
from pagoda.api.bodies.fields import renamed
from pagoda.api.bodies.vectors import MAX_INPUTS, encoded_vectors
from pagoda.api.http.request_context import RequestContext
from pagoda.errors import refuse
from pagoda.plugins.llamacpp.bodies import Prompt, prompts_of
from pagoda.text.embeddings import EmbeddingOptions, embed

_EUCLIDEAN = 2
_INT16_SCALE = 32760.0
"""Largest element of a vector that is scaled for 16-bit integers, as llama.cpp has it."""


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, token ids, or a list of these, as `content` or `input`."""

    content: Prompt | None = None
    input: Prompt | None = None
    model: str | None = None
    timeout: Timeout | None = None
    embd_normalize: Annotated[int, Meta(ge=-1, le=100)] | None = None
    """-1 changes nothing, 0 scales their largest element to 32760, p divides by the p-norm; 2 if left out."""


async def embedding(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(EmbeddingBody)
    param = "input" if body.content is None else "content"
    given = body.input if body.content is None else body.content
    if given is None:
        refuse("content", "is missing; it is a text or a list of texts", "missing_field")
    if body.content is not None and body.input is not None:
        refuse("content", "and input are the same; give one")
    generator = context.service.admit(body.model, context.client_request)
    with renamed({"prompt": param}):
        prompts = await prompts_of(given, generator)
    if len(prompts) > MAX_INPUTS:
        refuse(param, f"has {len(prompts)} texts; at most {MAX_INPUTS} are embedded in one body")
    found = await embed(
        generator,
        prompts,
        EmbeddingOptions(normalize=False),
        param=param,
        client_request=context.client_request,
    )
    kind = _EUCLIDEAN if body.embd_normalize is None else body.embd_normalize
    encoded = await encoded_vectors(found, partial(normalized, kind=kind))
    return context.json([{"index": index, "embedding": [one]} for index, one in enumerate(encoded)])


def normalized(vector: array[float], kind: int) -> list[float]:
    """A vector, scaled as `embd_normalize` says; one without length stays as it is."""
    peak = max(map(abs, vector))
    if kind < 0 or not peak:
        return vector.tolist()
    if kind == 0:
        length = peak / _INT16_SCALE
    elif kind == _EUCLIDEAN:
        length = math.hypot(*vector)
    else:
        length = peak * math.fsum((abs(x) / peak) ** kind for x in vector) ** (1 / kind)
    return [x / length for x in vector]
