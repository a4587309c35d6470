# SPDX-License-Identifier: Apache-2.0
"""`POST /classify` and `POST /pooling` as vLLM has them: scores of all labels, of texts or of tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from aiohttp import web

from pagoda.api.http.request_context import Caller, RequestContext
from pagoda.checkpoints.pooling_spec import ScoreKind
from pagoda.errors import refuse
from pagoda.messages.frontend import Pooling
from pagoda.plugins.scoring.embeddings import (
    EmbeddingRequest,
    Inputs,
    PoolingFields,
    envelope,
    inputs_of,
    usage,
    vectors,
)
from pagoda.text.embeddings import Embedding, score_texts
from pagoda.text.text_generator import TextGenerator


class ClassifyRequest(PoolingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: Inputs
    use_activation: bool | None = None
    """False gives scores as the model's head does."""


class PoolingRequest(EmbeddingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None
    """Purpose, by default that of the model; any model that gives vectors gives those of tokens too."""
    use_activation: bool | None = None
    """False gives scores as the model's head does."""


async def classify(context: RequestContext) -> web.StreamResponse:
    """The scores of all labels of each text, and the name of the highest."""
    body = await context.parse(ClassifyRequest)
    generator = context.service.admit(body.model, context.client_request)
    if generator.text.pooling.task == "token_classify":
        refuse("model", "gives labels of tokens; ask POST /pooling")
    found = await _scores(context.caller, generator, body, use_activation=body.use_activation)
    labels = generator.text.pooling.labels
    data = []
    for index, (_, [probs]) in enumerate(found):
        highest = max(range(len(probs)), key=probs.__getitem__)
        scored = {"label": labels[highest], "probs": probs, "num_classes": len(probs)}
        data.append({"index": index, **scored})
    return context.json(
        {
            **envelope(context.service, generator, "classify"),
            "object": "list",
            "data": data,
            "usage": usage([one for one, _ in found]),
        }
    )


async def pooling(context: RequestContext) -> web.StreamResponse:
    """Vectors of texts or of their tokens, or scores of the labels of either."""
    body = await context.parse(PoolingRequest)
    caller, generator = context.caller, context.service.admit(body.model, context.client_request)
    own = generator.text.pooling.task
    known = {"score": "classify", "generate": "embed"}.get(own, own)
    of_tokens = {"token_embed": Pooling.ALL, "token_classify": Pooling.WEIGHTS}
    if body.task not in (None, known) and (known != "embed" or body.task not in of_tokens):
        refuse("task", f"must be {known}, which the model is for")
    if known == "embed":
        options = body.vector_options
        if body.task in of_tokens:
            weighs = body.task == "token_classify"
            options = replace(options, pooling=of_tokens[body.task])
            options = replace(options, normalize=False) if weighs else options
        return context.json(
            await vectors(caller, generator, body, options, kind="pooling", key="data")
        )
    found = await _scores(caller, generator, body, use_activation=body.use_activation)
    data = [
        {
            "object": "pooling",
            "index": index,
            "data": rows if known == "token_classify" else rows[0],
        }
        for index, (_, rows) in enumerate(found)
    ]
    return context.json(
        {
            **envelope(context.service, generator, "pool"),
            "object": "list",
            "data": data,
            "usage": usage([one for one, _ in found]),
        }
    )


async def _scores(
    caller: Caller,
    generator: TextGenerator,
    body: ClassifyRequest | PoolingRequest,
    *,
    use_activation: bool | None,
) -> list[tuple[Embedding, list[list[float]]]]:
    """Results of each text, and its scores [1 or tokens, labels]."""
    options = body.options()
    scored = await score_texts(
        generator, inputs_of(body.input), options, client_request=caller.client_request
    )
    defaults = generator.text.pooling
    kind: ScoreKind = "identity" if use_activation is False else defaults.scores
    found = []
    for one in scored:
        work = partial(_activated, one.vector, len(defaults.labels), kind)
        found.append((one, await generator.run_sized(work, len(one.vector))))
    return found


def _activated(scores: array[float], num_labels: int, kind: ScoreKind) -> list[list[float]]:
    """Scores [n labels] as shares, a list for each text or token."""
    rows = (scores[first : first + num_labels] for first in range(0, len(scores), num_labels))
    activations: dict[ScoreKind, Callable[[Sequence[float]], list[float]]] = {
        "sigmoid": _sigmoids,
        "softmax": _softmax,
        "identity": list,
    }
    return [activations[kind](row) for row in rows]


def _sigmoids(row: Sequence[float]) -> list[float]:
    return [0.5 * (1.0 + math.tanh(0.5 * x)) for x in row]


def _softmax(row: Sequence[float]) -> list[float]:
    highest = max(row)
    weights = [math.exp(x - highest) for x in row]
    total = sum(weights)
    return [weight / total for weight in weights]
