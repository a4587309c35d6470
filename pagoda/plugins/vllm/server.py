# SPDX-License-Identifier: Apache-2.0
"""Small routes of vLLM: its tokenizer, its load, SageMaker's names, and several conversations in one body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from pagoda.api.http.request_context import RequestContext
from pagoda.api.openai.bodies import MAX_SEQUENCES_PER_BODY, ChatRequest
from pagoda.api.openai.chat import begin_chat, chat_completions
from pagoda.api.openai.completions import completions
from pagoda.concurrency.async_utils import gather_all
from pagoda.errors import InvalidRequestError, refuse
from pagoda.text.templates.conversation import Messages


class ChatBatchRequest(ChatRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A chat of several conversations, which have all other fields in common."""

    messages: Annotated[  # type: ignore[assignment]
        list[Messages], Meta(min_length=1, max_length=MAX_SEQUENCES_PER_BODY)
    ]


async def tokenizer_info(context: RequestContext) -> web.StreamResponse:
    """The tokenizer in the words of tokenizer_config.json."""
    generator = context.service.ready_generator()
    text = generator.text
    template = text.chat_template
    special = {} if template is None else template.special_tokens
    added = {
        str(token_id): {"content": token, "special": is_special}
        for token_id, (token, is_special) in text.tokenizer.added_tokens().items()
    }
    return context.json(
        {
            "tokenizer_class": "TokenizersBackend",
            **special,
            "chat_template": None if template is None else template.source,
            "model_max_length": generator.endpoint.limits.max_model_len,
            "added_tokens_decoder": added,
        }
    )


async def server_load(context: RequestContext) -> web.StreamResponse:
    """The number of requests that are being answered."""
    return context.json({"server_load": len(context.service.tracker.running)})


async def invocations(context: RequestContext) -> web.StreamResponse:
    """A body of SageMaker: that of a chat if it has messages, else that of a completion."""
    fields = await context.parse(dict[str, msgspec.Raw])
    if "messages" in fields:
        return await chat_completions(context)
    if "prompt" in fields:
        return await completions(context)
    raise InvalidRequestError("give messages or a prompt.", kind="missing_field")


async def chat_batch(context: RequestContext) -> web.StreamResponse:
    """Conversations in one body: `messages` is a list of them, and each gives choices in their order."""
    body = await context.parse(ChatBatchRequest)
    if body.stream:
        refuse("stream", "is not possible for several conversations", "not_supported")
    if len(body.messages) * (body.n or 1) > MAX_SEQUENCES_PER_BODY:
        refuse("n", f"times the conversations must be at most {MAX_SEQUENCES_PER_BODY}")
    if body.store:
        context.ignored.note("store")
    begun = []
    for messages in body.messages:
        chat = msgspec.structs.replace(body, messages=messages)
        begun.append(await begin_chat(context.caller, chat))
    wholes = await gather_all([generation.run(shape) for generation, shape in begun])
    choices = [choice for whole in wholes for choice in whole["choices"]]
    for index, choice in enumerate(choices):
        choice["index"] = index
    answer = {**wholes[0], "choices": choices, "usage": _total(wholes)}
    return await context.sized_json(answer, sum(generation.size for generation, _ in begun))


def _total(wholes: list[dict[str, Any]]) -> dict[str, Any]:
    usages: list[Mapping[str, Any]] = [whole["usage"] for whole in wholes]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: sum(usage[name] for usage in usages) for name in names}
