# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs of texts by a model that sees both at once: a cross-encoder, or a decoder that was asked."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from pagoda.concurrency.async_utils import gather_all
from pagoda.messages.sampling_params import SamplingParams
from pagoda.telemetry.request_tracker import ClientRequest
from pagoda.text.draft import Draft
from pagoda.text.embeddings import WHOLE_CONTEXT, EmbeddingError, EmbeddingOptions
from pagoda.text.templates.chat_template import ChatTemplate
from pagoda.text.text_generator import TextGenerator, TextRequest
from pagoda.text.tokenizers.tokenizer import PairTokens


@dataclass(frozen=True)
class TextPair:
    query: str
    document: str
    query_param: str
    """The client's name for the query in errors."""
    document_param: str


@dataclass(frozen=True)
class PairScore:
    value: float
    num_tokens: int
    num_cached_tokens: int = 0


async def score_pairs(
    generator: TextGenerator,
    pairs: Iterable[TextPair],
    options: EmbeddingOptions,
    *,
    raw: bool = False,
    client_request: ClientRequest | None = None,
) -> list[PairScore]:
    """The score of each pair, in their order; `raw` ones are as the model's head gives them.

    Raises InvalidRequestError: a text does not fit the model; names the field. EmbeddingError: an engine failed.
    OverloadedError, EngineDeadError: as `Endpoint.generate`."""
    sampling = generator.check_sampling(SamplingParams(temperature=0, seed=0, max_tokens=0))
    requests: list[TextRequest] = []
    for pair in pairs:
        tokens = await _tokens(generator, pair, options)
        draft = Draft(
            param=pair.document_param,
            priority=options.priority,
            cache_salt=options.cache_salt,
            pooling=generator.text.pooling.head,
            second_text_at=tokens.second,
            client_request=client_request,
        )
        requests += await generator.prepare(tokens.ids, sampling, draft)
    sigmoid = generator.text.pooling.scores == "sigmoid" and not raw
    return await gather_all([_score(generator, one, sigmoid=sigmoid) for one in requests])


async def _tokens(
    generator: TextGenerator, pair: TextPair, options: EmbeddingOptions
) -> PairTokens:
    """The prompt of a pair, cut to what was asked for: the longer text first, of a template the document."""
    most, context = options.truncate_prompt_tokens, generator.endpoint.limits.max_model_len
    if most is not None:
        most = context if most == WHOLE_CONTEXT else min(most, context)
    template = generator.text.chat_template
    if template is not None and is_pair_template(template):
        return PairTokens(await _rendered(generator, template, pair, most), 0)
    tokenizer = generator.text.tokenizer
    texts = []
    for text, param in ((pair.query, pair.query_param), (pair.document, pair.document_param)):
        if most is None:
            generator.check_length(text, param)
        else:
            text = text[: (most + 1) * tokenizer.longest_token_chars]
        texts.append(text)
    special = options.add_special_tokens
    work = partial(tokenizer.encode_pair, *texts, add_special_tokens=special, most=most)
    return await generator.run_sized(work, sum(map(len, texts)))


def is_pair_template(template: ChatTemplate) -> bool:
    """True if a chat template renders pairs of texts: it knows messages with the roles query and document."""
    return any(f"{quote}document{quote}" in template.source for quote in "'\"")


async def _rendered(
    generator: TextGenerator, template: ChatTemplate, pair: TextPair, most: int | None
) -> list[int]:
    """Token ids of a pair in a template, the document cut so that there are at most `most`."""
    tokenizer, document = generator.text.tokenizer, pair.document
    generator.check_length(pair.query, pair.query_param)
    if most is None:
        generator.check_length(document, pair.document_param)
    else:
        document = document[: (most + 1) * tokenizer.longest_token_chars]

    def render(document: str) -> list[int]:
        texts = {"query": pair.query, "document": document}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        return tokenizer.encode(template.render(messages), add_special_tokens=False)

    def encode() -> list[int]:
        token_ids = render(document)
        if most is None or len(token_ids) <= most:
            return token_ids
        own = tokenizer.encode(document, add_special_tokens=False)
        kept = own[: max(0, len(own) - (len(token_ids) - most))]
        return render(tokenizer.decode(kept, skip_special_tokens=False))

    return await generator.run_sized(encode, len(pair.query) + len(document))


async def _score(generator: TextGenerator, request: TextRequest, *, sigmoid: bool) -> PairScore:
    async with aclosing(generator.stream(request)) as deltas:
        async for delta in deltas:
            if delta.error is not None:
                raise EmbeddingError(f"{request.request.request_id}: {delta.error}")
            if delta.embedding is not None:
                value, *others = array("f", delta.embedding)
                if others:
                    raise EmbeddingError(f"{request.request.request_id}: it has several scores.")
                num_tokens = len(request.request.prompt_token_ids)
                shown = _sigmoid(value) if sigmoid else value
                return PairScore(shown, num_tokens, delta.num_cached_tokens)
    raise EmbeddingError(f"{request.request.request_id}: it was aborted.")


def _sigmoid(value: float) -> float:
    if value < 0:
        return math.exp(value) / (1 + math.exp(value))
    return 1 / (1 + math.exp(-value))
