# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/score` as vLLM has it, and `POST /v1/rerank` as Jina, Cohere and vLLM do.

A model that scores pairs of texts does so; any other scores two texts by the cosine of their vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from pagoda.api.bodies.vectors import MAX_INPUTS
from pagoda.api.http.request_context import RequestContext
from pagoda.errors import refuse
from pagoda.plugins.scoring.embeddings import PoolingFields, envelope, usage
from pagoda.plugins.scoring.pair_scores import PairScore, TextPair, score_pairs
from pagoda.text.embeddings import Embedding, embed, names_of, products
from pagoda.text.text_generator import TextGenerator

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
    documents: Annotated[list[str | _Text], Meta(max_length=MAX_INPUTS)] | None = None
    texts: Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    """Name of `documents` in Text Embeddings Inference, whose answer is a list."""
    return_text: bool | None = None
    """Name of `return_documents` there; false by default."""
    raw_scores: bool | None = None
    truncate: bool | None = None
    """True cuts texts to the context there; false is the default."""
    truncation_direction: Annotated[Any, ("Right", "right")] = None
    top_n: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """The best documents that are wanted; 0 and None mean all."""
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """Cohere's name for `truncate_prompt_tokens`."""


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


async def score(context: RequestContext) -> web.StreamResponse:
    """The score of each pair; one text against several is as many pairs."""
    body = await context.parse(ScoreRequest)
    (left, right), names = _pairs(body)
    generator = context.service.admit(body.model, context.client_request)
    found: Sequence[Embedding | PairScore]
    if generator.text.pooling.task == "score":
        of_left, of_right = names[: len(left)], names[len(left) :]
        if len(left) == 1:
            left, of_left = left * len(right), of_left * len(right)
        columns = zip(left, right, of_left, of_right, strict=True)
        found = scored = await _score(context, generator, body, [TextPair(*it) for it in columns])
        scores = [one.value for one in scored]
    else:
        found = embedded = await _embed(context, generator, body, [*left, *right], names)
        ones, others = embedded[: len(left)], embedded[len(left) :]
        if len(ones) == 1:
            ones = ones * len(others)
        pairs = zip(ones, others, strict=True)
        scores = await products(generator, pairs)
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    return context.json(
        {
            **envelope(context.service, generator, "score"),
            "object": "list",
            "data": data,
            "usage": usage(found),
        }
    )


def _pairs(body: ScoreRequest) -> tuple[list[list[str]], list[str]]:
    """Both sides of the pairs, and the names of all texts, for errors.
    Raises InvalidRequestError: texts are missing, or do not make pairs."""
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
    places = [*names_of(names[0], len(left)), *names_of(names[1], len(right))]
    return both, places


async def rerank(context: RequestContext) -> web.StreamResponse:
    """The documents by their scores against the query, the best first."""
    body = await context.parse(RerankRequest)
    texts = _documents(body)
    if body.max_tokens_per_doc is not None:
        if body.truncate_prompt_tokens is not None:
            refuse("max_tokens_per_doc", "and truncate_prompt_tokens are the same; give one")
        body = msgspec.structs.replace(body, truncate_prompt_tokens=body.max_tokens_per_doc)
    if body.truncate and body.truncate_prompt_tokens is None:
        body = msgspec.structs.replace(body, truncate_prompt_tokens=-1)
    generator = context.service.admit(body.model, context.client_request)
    param = "documents" if body.texts is None else "texts"
    names = ["query", *names_of(param, len(texts))]
    found: Sequence[Embedding | PairScore]
    if generator.text.pooling.task == "score":
        pairs = [
            TextPair(body.query, text, "query", name)
            for text, name in zip(texts, names[1:], strict=True)
        ]
        found = scored = await _score(context, generator, body, pairs, raw=body.raw_scores is True)
        scores = [one.value for one in scored]
    else:
        found = embedded = await _embed(context, generator, body, [body.query, *texts], names)
        query, *documents = embedded
        scores = await products(generator, ((query, document) for document in documents))
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    best = order[: body.top_n or None]
    if body.texts is not None:
        with_text = body.return_text is True
        return context.json([_ranked(index, scores, texts, with_text=with_text) for index in best])
    results = []
    for index in best:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    head = envelope(context.service, generator, "rerank")
    return context.json({**head, "results": results, "usage": usage(found)})


def _documents(body: RerankRequest) -> list[str]:
    """The texts to rank. Raises InvalidRequestError: they are missing, given twice, or none."""
    if body.texts is not None and body.documents is not None:
        refuse("texts", "and documents are the same; give one")
    if body.texts is None and (body.return_text is not None or body.raw_scores is not None):
        name = "return_text" if body.return_text is not None else "raw_scores"
        refuse(name, "is only for texts; documents have return_documents")
    if body.texts is None and body.documents is None:
        refuse("documents", "is missing", "missing_field")
    given = body.documents if body.texts is None else body.texts
    if not given:
        refuse("documents" if body.texts is None else "texts", "is an empty list")
    return [one if isinstance(one, str) else one.text for one in given]


def _ranked(
    index: int, scores: Sequence[float], texts: Sequence[str], *, with_text: bool
) -> dict[str, Any]:
    """A document in the words of Text Embeddings Inference."""
    ranked: dict[str, Any] = {"index": index, "score": scores[index]}
    return {**ranked, "text": texts[index]} if with_text else ranked


async def _score(
    context: RequestContext,
    generator: TextGenerator,
    body: PoolingFields,
    pairs: Sequence[TextPair],
    *,
    raw: bool = False,
) -> list[PairScore]:
    if body.pooling is not None:
        refuse("pooling", "is for models that give vectors; this one has a head that scores pairs")
    return await score_pairs(
        generator, pairs, body.options(), raw=raw, client_request=context.client_request
    )


async def _embed(
    context: RequestContext,
    generator: TextGenerator,
    body: PoolingFields,
    texts: Sequence[str],
    names: Sequence[str],
) -> list[Embedding]:
    return await embed(
        generator,
        texts,
        body.options(normalize=True),
        param=names,
        client_request=context.client_request,
    )
