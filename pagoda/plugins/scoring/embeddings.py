# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/embeddings` as OpenAI has it, and `POST /pooling` as vLLM does."""

from __future__ import annotations

import base64
import sys
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from pagoda.api.bodies.body import Timeout
from pagoda.api.bodies.fields import MAX_TOKEN_IDS, TokenIds
from pagoda.api.bodies.vectors import MAX_INPUTS, encoded_vectors
from pagoda.api.http.request_context import Caller, RequestContext
from pagoda.api.service import Service
from pagoda.errors import refuse
from pagoda.messages.frontend import Pooling
from pagoda.messages.sampling_params import TokenId
from pagoda.plugins.scoring.pair_scores import PairScore
from pagoda.text.embeddings import Embedding, EmbeddingOptions, embed
from pagoda.text.text_generator import TextGenerator

Inputs = str | Annotated[list[str | TokenId | TokenIds], Meta(max_length=MAX_TOKEN_IDS)]


class PoolingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that the bodies of all these routes have in common."""

    model: str | None = None
    timeout: Timeout | None = None
    user: str | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    """Pooling other than the model's own."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None

    def options(
        self,
        *,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> EmbeddingOptions:
        if self.truncate_prompt_tokens == 0:
            refuse("truncate_prompt_tokens", "must be at least 1, or -1 for the whole context")
        return EmbeddingOptions(
            pooling=None if self.pooling is None else Pooling(self.pooling),
            normalize=normalize,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens is not False,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
        )


class EmbeddingRequest(PoolingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """Leading elements of each vector that are wanted, normalised anew."""
    normalize: bool | None = None
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None
    """Name of the beginning that the model's authors gave texts of a kind, such as `query`."""
    embed_dtype: Annotated[Any, ("float32", "auto")] = None
    endianness: Annotated[Any, ("native", "little")] = None

    @property
    def vector_options(self) -> EmbeddingOptions:
        return self.options(
            normalize=self.normalize, dimensions=self.dimensions, prompt_name=self.prompt_name
        )


async def embeddings(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(EmbeddingRequest)
    return context.json(await answer_embeddings(context.caller, body))


async def answer_embeddings(caller: Caller, body: EmbeddingRequest) -> dict[str, Any]:
    """The vectors of a body, in OpenAI's form.
    Raises InvalidRequestError: a value is not as it must be; names the field. ApiError: as `Service.admit`."""
    generator = caller.service.admit(body.model, caller.client_request)
    options = body.vector_options
    return await vectors(caller, generator, body, options, kind="embedding", key="embedding")


async def vectors(
    caller: Caller,
    generator: TextGenerator,
    body: EmbeddingRequest,
    options: EmbeddingOptions,
    *,
    kind: str,
    key: str,
) -> dict[str, Any]:
    """The vectors of a body's texts as `options` ask for them, each an object of a `kind` that has it as `key`.
    Raises InvalidRequestError: a value is not as it must be; names the field. ApiError: as `Service.admit`."""
    found = await embed(
        generator, inputs_of(body.input), options, client_request=caller.client_request
    )
    encode = _base64 if body.encoding_format == "base64" else _floats
    encoded = await encoded_vectors(found, encode)
    data = [{"object": kind, "index": index, key: one} for index, one in enumerate(encoded)]
    return {
        **envelope(caller.service, generator, "embd" if kind == "embedding" else "pool"),
        "object": "list",
        "data": data,
        "usage": usage(found),
    }


def inputs_of(given: str | list[Any]) -> list[str | list[int]]:
    """The texts of a body: a string, token ids, or a list of either.
    Raises InvalidRequestError: the list is empty, mixed, or too long."""
    if isinstance(given, str):
        return [given]
    if not given:
        refuse("input", "is an empty list")
    kinds_of_items = set(map(type, given))
    if kinds_of_items == {int}:
        return [given]
    if kinds_of_items not in ({str}, {list}):
        kinds = "a string, token ids, a list of strings or a list of lists of token ids"
        refuse("input", f"must be {kinds}")
    if len(given) > MAX_INPUTS:
        refuse("input", f"has {len(given)} texts; at most {MAX_INPUTS} are embedded in one body")
    return given


def _floats(vector: array[float]) -> list[float]:
    return vector.tolist()


def _base64(vector: array[float]) -> str:
    """The elements as little-endian float32."""
    if sys.byteorder != "little":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def envelope(service: Service, generator: TextGenerator, id_prefix: str) -> dict[str, Any]:
    """The head of an answer, with the name of the model or adapter that `generator` answers by."""
    return {
        "id": f"{id_prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": service.name_of(generator),
    }


def usage(found: Sequence[Embedding | PairScore]) -> dict[str, Any]:
    num_tokens = sum(one.num_tokens for one in found)
    cached = sum(one.num_cached_tokens for one in found)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
