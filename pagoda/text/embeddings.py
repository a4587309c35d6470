# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts: hidden states of a prompt's tokens, pooled by the engine, cut and normalised here."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from operator import mul

from pagoda.concurrency.async_utils import gather_all
from pagoda.errors import refuse
from pagoda.messages.frontend import Pooling
from pagoda.messages.sampling_params import SamplingParams
from pagoda.telemetry.request_tracker import ClientRequest
from pagoda.text.draft import Draft
from pagoda.text.text_generator import TextGenerator, TextRequest

WHOLE_CONTEXT = -1
"""Value of `truncate_prompt_tokens` that stands for the length of the context."""
_ELEMENT_BYTES = 4
_SPARE_TOKENS = 8
"""Tokens by which a text may be longer than what is kept of it, so that the cut does not change kept tokens."""


class EmbeddingError(Exception):
    """The engine failed with a text. The words are for the log, not for the client."""


@dataclass(frozen=True)
class EmbeddingOptions:
    """Wishes of a client; those of the model stand for what is None."""

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    """Leading elements that are kept, before normalising (Matryoshka representations, Kusupati et al. 2022)."""
    truncate_prompt_tokens: int | None = None
    """Longer prompts are cut to so many tokens; -1 cuts to the context."""
    add_special_tokens: bool = True
    prompt_name: str | None = None
    """Name of the beginning that the model's authors gave texts of a kind; theirs where it is None."""
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class Embedding:
    vector: array[float]
    """[dimensions] float32; of several, [count, dimensions]."""
    num_tokens: int
    num_cached_tokens: int = 0
    count: int = 1
    """Vectors, those of all tokens where these are wanted."""

    @property
    def rows(self) -> list[array[float]]:
        """The vectors."""
        size = len(self.vector) // self.count
        return [self.vector[i * size : (i + 1) * size] for i in range(self.count)]


async def embed(
    generator: TextGenerator,
    prompts: Sequence[str | Sequence[int]],
    options: EmbeddingOptions,
    *,
    param: str | Sequence[str] = "input",
    client_request: ClientRequest | None = None,
) -> list[Embedding]:
    """The vectors of texts or token ids, in their order; `param` is the client's name for them in errors, or the
    name of each.
    Raises InvalidRequestError: a value does not fit the model; names the field. EmbeddingError: an engine failed.
    OverloadedError, EngineDeadError: as `Endpoint.generate`."""
    defaults = generator.text.pooling
    if defaults.task == "score":
        refuse(
            "model", "gives scores of pairs of texts, no vectors; ask POST /v1/rerank or /v1/score"
        )
    if defaults.labels:
        refuse("model", "gives labels of texts, no vectors; ask POST /classify")
    pooling = options.pooling or defaults.pooling
    if pooling is Pooling.FIRST and not defaults.encodes:
        refuse("pooling", "must be last or mean: in a decoder, the first token has seen no other")
    try:
        beginning = defaults.prompt(options.prompt_name)
    except KeyError:
        known = ", ".join(sorted(defaults.prompts)) or "none"
        refuse(
            "prompt_name", f"must be the name of a prompt of the model, of which there are: {known}"
        )
    if pooling is Pooling.ALL and options.dimensions is not None:
        refuse("dimensions", "is of vectors of whole texts; this model gives those of tokens")
    if pooling is Pooling.WEIGHTS and not defaults.weighs_tokens:
        refuse("task", "must be of vectors; this model gives tokens no weights")
    normalize = defaults.normalize if options.normalize is None else options.normalize
    requests = await _prepared(
        generator, prompts, options, pooling, param, beginning, client_request=client_request
    )
    return await gather_all(
        [_embedding(generator, request, options, normalize=normalize) for request in requests]
    )


async def score_texts(
    generator: TextGenerator,
    prompts: Sequence[str | Sequence[int]],
    options: EmbeddingOptions,
    *,
    client_request: ClientRequest | None = None,
) -> list[Embedding]:
    """The scores that the model's head gives texts or token ids, or each of their tokens, in their order.
    Raises what `embed` raises."""
    defaults = generator.text.pooling
    if not defaults.labels:
        refuse("model", "has no head that gives scores of labels")
    if options.pooling is not None:
        refuse("pooling", "is for models that give vectors; this one has a head that gives scores")
    requests = await _prepared(
        generator, prompts, options, defaults.head, "input", "", client_request=client_request
    )
    return await gather_all(
        [_embedding(generator, it, options, normalize=False) for it in requests]
    )


async def _prepared(
    generator: TextGenerator,
    prompts: Sequence[str | Sequence[int]],
    options: EmbeddingOptions,
    pooling: Pooling,
    param: str | Sequence[str],
    beginning: str,
    *,
    client_request: ClientRequest | None,
) -> list[TextRequest]:
    """Requests that pool texts, each behind a beginning."""
    sampling = generator.check_sampling(SamplingParams(temperature=0, seed=0, max_tokens=0))
    requests: list[TextRequest] = []
    names = names_of(param, len(prompts)) if isinstance(param, str) else param
    for name, prompt in zip(names, prompts, strict=True):
        if beginning and isinstance(prompt, str):
            prompt = f"{beginning}{prompt}"
        token_ids = await _token_ids(generator, prompt, options, name)
        draft = Draft(
            param=name,
            priority=options.priority,
            cache_salt=options.cache_salt,
            pooling=pooling,
            client_request=client_request,
        )
        requests += await generator.prepare(token_ids, sampling, draft)
    return requests


def names_of(param: str, count: int) -> list[str]:
    """The client's names for texts that are given as one field, which stand in a list if they are several."""
    return [param] if count == 1 else [f"{param}[{index}]" for index in range(count)]


async def _token_ids(
    generator: TextGenerator, prompt: str | Sequence[int], options: EmbeddingOptions, param: str
) -> Sequence[int]:
    most = options.truncate_prompt_tokens
    if most == WHOLE_CONTEXT:
        most = generator.endpoint.limits.max_model_len
    if not isinstance(prompt, str):
        return prompt if most is None else prompt[:most]
    special = options.add_special_tokens
    if most is None:
        return await generator.encode(prompt, add_special_tokens=special, param=param)
    most = min(most, generator.endpoint.limits.max_model_len)
    prompt = prompt[: (most + _SPARE_TOKENS) * generator.text.tokenizer.longest_token_chars]
    token_ids = await generator.tokenize(prompt, add_special_tokens=special)
    if len(token_ids) <= most:
        return token_ids
    bare = await generator.tokenize(prompt, add_special_tokens=False)
    num_special = len(token_ids) - len(bare)
    begin = next(i for i in range(num_special + 1) if token_ids[i : i + len(bare)] == bare)
    end = begin + len(bare)
    # Special tokens stay: some models pool the last one.
    cut = [*token_ids[:begin], *bare[: max(0, most - num_special)], *token_ids[end:]]
    return cut[:most]


async def _embedding(
    generator: TextGenerator, request: TextRequest, options: EmbeddingOptions, *, normalize: bool
) -> Embedding:
    async with aclosing(generator.stream(request)) as deltas:
        async for delta in deltas:
            if delta.error is not None:
                raise EmbeddingError(f"{request.request.request_id}: {delta.error}")
            if delta.embedding is not None:
                num_tokens = len(request.request.prompt_token_ids)
                pooling = request.request.work.pooling
                count = num_tokens if pooling in (Pooling.ALL, Pooling.WEIGHTS) else 1
                work = partial(
                    _finished, delta.embedding, count, options.dimensions, normalize=normalize
                )
                return Embedding(
                    await generator.run_sized(work, len(delta.embedding) // _ELEMENT_BYTES),
                    num_tokens,
                    delta.num_cached_tokens,
                    count,
                )
    raise EmbeddingError(f"{request.request.request_id}: it was aborted.")


def _finished(
    pooled: bytes, count: int, dimensions: int | None, *, normalize: bool
) -> array[float]:
    vector = array("f")
    vector.frombytes(pooled)
    if count > 1:
        size, vectors = len(pooled) // count, array("f")
        for first in range(0, count * size, size):
            part = pooled[first : first + size]
            vectors.extend(_finished(part, 1, None, normalize=normalize))
        return vectors
    if dimensions is not None:
        if dimensions > len(vector):
            refuse("dimensions", f"must be at most {len(vector)}, which the model has")
        vector = vector[:dimensions]
    length = math.hypot(*vector) if normalize else 1.0
    return array("f", [x / length for x in vector]) if normalize and length else vector


async def products(
    generator: TextGenerator, pairs: Iterable[tuple[Embedding, Embedding]]
) -> list[float]:
    """The inner product of the vectors of each pair; other streams go on meanwhile.

    Of vectors of length 1 it is the cosine of the angle between them, and 0 if one of them has no length. Of
    vectors of tokens, the highest products of each of the first text's are added up (Khattab and Zaharia 2020).
    """
    found = []
    for one, other in pairs:
        await asyncio.sleep(0)
        if one.count == other.count == 1:
            found.append(sum(map(mul, one.vector, other.vector)))
        else:
            size = len(one.vector) * other.count
            found.append(await generator.run_sized(partial(_late_product, one, other), size))
    return found


def _late_product(one: Embedding, other: Embedding) -> float:
    rows, total = other.rows, 0.0
    for own in one.rows:
        total += max(sum(map(mul, own, row)) for row in rows)
    return total
