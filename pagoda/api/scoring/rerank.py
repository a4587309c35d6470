"""`POST /v1/score` as vLLM has it, and `POST /v1/rerank` as Jina, Cohere and vLLM do.

A decoder scores two texts by the cosine of their vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from pagoda.api.request_context import RequestContext
from pagoda.api.scoring.embeddings import MAX_INPUTS, PoolingFields, envelope, usage
from pagoda.errors import refuse
from pagoda.frontend.embeddings import Embedding, cosine, embed

Texts = str | Annotated[list[str], Meta(max_length=MAX_INPUTS)]


class ScoreRequest(PoolingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pairs of texts, under the names of older and newer versions of vLLM."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class _Text(msgspec.Struct, frozen=True):
    """A document as an object, of which only the text counts."""

    text: str


class RerankRequest(PoolingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: Annotated[list[str | _Text], Meta(max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """The best documents that are wanted; 0 and None mean all."""
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """Cohere's name for `truncate_prompt_tokens`."""


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


async def score(context: RequestContext) -> web.StreamResponse:
    """The score of each pair; one text against several is as many pairs."""
    body = await context.parse(ScoreRequest)
    left, right = _pairs(body)
    found = await _embed(context, body, [*left, *right], "text_1")
    ones, others = found[: len(left)], found[len(left) :]
    if len(ones) == 1:
        ones = ones * len(others)
    data = [
        {"index": index, "object": "score", "score": cosine(one.vector, other.vector)}
        for index, (one, other) in enumerate(zip(ones, others, strict=True))
    ]
    return context.json(
        {**envelope(context, "score"), "object": "list", "data": data, "usage": usage(found)}
    )


def _pairs(body: ScoreRequest) -> tuple[list[str], list[str]]:
    given = [names for names in _PAIRS if any(getattr(body, name) is not None for name in names)]
    if len(given) != 1:
        refuse("text_1", "and text_2 must be given, or queries and documents")
    names = given[0]
    both = []
    for name in names:
        texts = getattr(body, name)
        if not texts:
            refuse(name, "is missing or empty; it must be a text or a list of texts")
        both.append([texts] if isinstance(texts, str) else texts)
    left, right = both
    if len(left) not in (1, len(right)):
        rule = f"has {len(left)} texts and {names[1]} {len(right)}; give one, or as many"
        refuse(names[0], rule)
    return left, right


async def rerank(context: RequestContext) -> web.StreamResponse:
    """The documents by their scores against the query, the best first."""
    body = await context.parse(RerankRequest)
    if not body.documents:
        refuse("documents", "is an empty list")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    if body.max_tokens_per_doc is not None:
        if body.truncate_prompt_tokens is not None:
            refuse("max_tokens_per_doc", "and truncate_prompt_tokens are the same; give one")
        body = msgspec.structs.replace(body, truncate_prompt_tokens=body.max_tokens_per_doc)
    query, *documents = found = await _embed(context, body, [body.query, *texts], "documents")
    scores = [cosine(query.vector, document.vector) for document in documents]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in order[: body.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return context.json({**envelope(context, "rerank"), "results": results, "usage": usage(found)})


async def _embed(
    context: RequestContext, body: PoolingFields, texts: Sequence[str], param: str
) -> list[Embedding]:
    generator = context.service.admit(body.model)
    return await embed(
        generator,
        texts,
        body.options(),
        param=param,
        client_request=context.client_request,
    )
