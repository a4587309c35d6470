"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.errors import ApiError
from pagoda.api.fields import TokenIds
from pagoda.api.openai.bodies import Tools
from pagoda.api.request_context import RequestContext
from pagoda.errors import InvalidRequestError
from pagoda.frontend.conversation import Messages
from pagoda.frontend.text_generator import TextGenerator


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a text, or a conversation as the model would see it."""

    model: str | None = None
    prompt: str | None = None
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
    context.service.check_model(body.model)
    generator = context.service.ready_generator()
    token_ids = await _token_ids(body, generator)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": generator.endpoint.limits.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = await generator.spell(token_ids)
    return context.json(answer)


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
    context.service.check_model(body.model)
    generator = context.service.ready_generator()
    vocab_size = generator.endpoint.limits.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        raise ApiError(400, f"tokens takes token ids below {vocab_size}.", "tokens")
    return context.json({"prompt": await generator.decode(body.tokens)})
