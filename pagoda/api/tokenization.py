# SPDX-License-Identifier: Apache-2.0
"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.bodies.fields import TokenIds
from pagoda.api.errors import ApiError
from pagoda.api.http.request_context import RequestContext
from pagoda.api.http.sse import encode_json
from pagoda.api.openai.bodies import Tools
from pagoda.errors import InvalidRequestError
from pagoda.text.templates.conversation import Messages
from pagoda.text.text_generator import TextGenerator
from pagoda.text.tokenizers.tokenizer import Tokenizer

_TOKENS_AT_ONCE = 4096
"""Tokens whose pieces are put together without letting other threads run."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a text, or a conversation as the model would see it."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    """Text in the words of llama.cpp, whose answer has the tokens alone, and by default no special tokens."""
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: TokenIds
    model: str | None = None


async def tokenize(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(TokenizeRequest)
    client = context.client_request
    generator = context.service.named(body.model, client).of_client(client)
    if body.content is not None:
        tokens = await _llama_tokens(body, generator)
        return await context.sized_json({"tokens": tokens}, len(body.content))
    _check_names(body)
    token_ids = await _token_ids(body, generator)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": generator.endpoint.limits.max_model_len,
        "tokens": token_ids,
        "token_strs": await generator.spell(token_ids) if body.return_token_strs else None,
    }
    return await context.sized_json(answer, len(token_ids))


def _check_names(body: TokenizeRequest) -> None:
    """Raises InvalidRequestError: a field is given that goes with `content` alone."""
    for name in ("add_special", "parse_special", "with_pieces"):
        if getattr(body, name) is not None:
            raise InvalidRequestError(f"{name} goes with content, not with prompt.", param=name)


async def _llama_tokens(body: TokenizeRequest, generator: TextGenerator) -> list[int] | msgspec.Raw:
    """The tokens of `content`, as llama.cpp lists them."""
    if body.prompt is not None or body.messages is not None:
        raise InvalidRequestError("give either content or prompt or messages.", param="content")
    if body.parse_special is False:
        raise InvalidRequestError("parse_special: false is not supported.", param="parse_special")
    token_ids = await generator.encode(
        body.content or "", add_special_tokens=bool(body.add_special), param="content"
    )
    if not body.with_pieces:
        return token_ids
    work = partial(_with_pieces, generator.text.tokenizer, token_ids)
    return await generator.run_sized(work, len(token_ids))


def _with_pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> msgspec.Raw:
    """The JSON of all tokens, each with its text."""

    @cache
    def told(token_id: int) -> bytes:
        return encode_json({"id": token_id, "piece": _piece(tokenizer.token_bytes(token_id))})

    starts = range(0, len(token_ids), _TOKENS_AT_ONCE)
    parts = (b",".join(map(told, token_ids[i : i + _TOKENS_AT_ONCE])) for i in starts)
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def _piece(token: bytes) -> str | list[int]:
    """A token as text, or as its bytes if they are no text by themselves."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return list(token)


async def _token_ids(body: TokenizeRequest, generator: TextGenerator) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages.", param="prompt")
    if body.prompt is not None:
        return await generator.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    text = await generator.render(
        body.messages or (),
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return await generator.encode(
        text, add_special_tokens=bool(body.add_special_tokens), param="messages"
    )


async def detokenize(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(DetokenizeRequest)
    client = context.client_request
    generator = context.service.named(body.model, client).of_client(client)
    vocab_size = generator.endpoint.limits.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        raise ApiError(400, f"tokens takes token ids below {vocab_size}.", "tokens")
    text = await generator.decode(body.tokens)
    if body.model is not None:  # llama.cpp's clients name none, and vLLM's read nothing else
        return context.json({"prompt": text})
    return context.json({"prompt": text, "content": text})
