# SPDX-License-Identifier: Apache-2.0
"""An API of another package whose prompts have a picture: places for vectors of its own, in front of tokens."""

from __future__ import annotations

import random
from array import array
from contextlib import aclosing

import msgspec
from aiohttp import web

from pagoda.api.http.request_context import RequestContext
from pagoda.api.plugin import ApiPlugin
from pagoda.api.route import ANY_KEY, Route
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.spans import embedded_span
from pagoda.text.draft import Draft
from pagoda.text.text_generator import joined_deltas

PLACES = 48

HIDDEN = 1
"""Size of the simulated model's embeddings."""


class PictureRequest(msgspec.Struct, frozen=True):
    picture: int
    """Seed of the vectors."""
    prompt: list[int]


async def describe(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(PictureRequest)
    generator = context.service.admit(None, context.client_request)
    rng = random.Random(body.picture)
    vectors = array("f", [rng.random() for _ in range(PLACES * HIDDEN)])
    draft = Draft(
        spans=(embedded_span(0, PLACES, vectors.tobytes()),), client_request=context.client_request
    )
    sampling = generator.check_sampling(SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
    [request] = await generator.prepare([0] * PLACES + body.prompt, sampling, draft)
    async with aclosing(generator.stream(request)) as deltas:
        answer = joined_deltas([delta async for delta in deltas])
    return context.json({"tokens": answer.token_ids, "cached": answer.num_cached_tokens})


API = ApiPlugin(routes={"/pictures": {"POST": Route(describe, "Describes a picture.", ANY_KEY)}})
