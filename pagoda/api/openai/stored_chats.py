# SPDX-License-Identifier: Apache-2.0
"""Chat completions that are kept, as their clients asked with `store`: a list, one, its messages, its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.answers.kept_conversations import SizedItems, StoredConversation, sized
from pagoda.api.bodies.fields import Metadata
from pagoda.api.bodies.items import page_of_items
from pagoda.api.errors import ApiError
from pagoda.api.http.request_context import RequestContext
from pagoda.api.openai.bodies import ChatRequest
from pagoda.errors import InvalidRequestError, refuse
from pagoda.text.json_size import json_size

MAX_KEPT_CHARS = 2**18
"""Most characters of messages and answer that are kept; they are written on the event loop when one is read."""
_METADATA = "metadata["


class MetadataBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New metadata of a chat completion."""

    metadata: Metadata


async def keep_chat(
    context: RequestContext, body: ChatRequest, completion: dict[str, Any], size: int
) -> None:
    """Keeps an answer of such a size and what was asked; one that is too large is named as ignored."""
    metadata, chat_id = body.metadata or {}, completion["id"]
    stored = StoredConversation(context.key_name, metadata, conversation_id=chat_id)
    try:
        items = await context.caller.translate(partial(_kept, body, completion), more=size)
        context.service.chats.put(stored, items)
    except InvalidRequestError:
        context.ignored.note("store")


def _kept(body: ChatRequest, completion: dict[str, Any]) -> SizedItems:
    """An answer and the messages that it was asked, with ids. Raises InvalidRequestError: they are too large."""
    messages = [
        {**msgspec.to_builtins(message), "id": f"{completion['id']}-{index}"}
        for index, message in enumerate(body.messages)
    ]
    if json_size([messages, completion], MAX_KEPT_CHARS) > MAX_KEPT_CHARS:
        refuse("messages", f"and the answer have more than {MAX_KEPT_CHARS} characters")
    return sized([completion, *messages])


async def list_chats(context: RequestContext) -> web.StreamResponse:
    """The client's completions, oldest first unless `order` says otherwise, of a `model` or with some metadata."""
    query = context.http.query
    wanted = {
        name.removeprefix(_METADATA).removesuffix("]"): value
        for name, value in query.items()
        if name.startswith(_METADATA)
    }
    shown = [
        _shown(stored)
        for stored in context.service.chats.all_of(context.key_name)
        if wanted.items() <= stored.metadata.items()
    ]
    model = query.get("model")
    found = [one for one in shown if model in (None, one["model"])]
    page = page_of_items(found, _oldest_first(query))
    return await context.sized_json(page, MAX_KEPT_CHARS * len(page["data"]))


async def get_chat(context: RequestContext) -> web.StreamResponse:
    """Answers with a completion, or the messages that it was asked."""
    chat_id, _, part = context.path_argument.partition("/")
    stored = context.service.chats.get(context.key_name, chat_id)
    if part == "messages":
        _, *messages = stored.items.values()
        return context.json(page_of_items(messages, _oldest_first(context.http.query)))
    if part:
        raise ApiError(404, f"A chat completion has no {part[:64]!r}.")
    return context.json(_shown(stored))


async def change_chat(context: RequestContext) -> web.StreamResponse:
    """Sets the metadata of a completion."""
    body = await context.parse(MetadataBody)
    stored = context.service.chats.get(context.key_name, context.path_argument)
    context.service.chats.set_metadata(stored, body.metadata)
    return context.json(_shown(stored))


async def delete_chat(context: RequestContext) -> web.StreamResponse:
    """Forgets a completion."""
    stored = context.service.chats.get(context.key_name, context.path_argument)
    context.service.chats.remove(stored)
    deleted = {"id": stored.conversation_id, "object": "chat.completion.deleted", "deleted": True}
    return context.json(deleted)


def _oldest_first(query: Mapping[str, str]) -> dict[str, str]:
    return {"order": "asc", **query}


def _shown(stored: StoredConversation) -> dict[str, Any]:
    return {**stored.items[stored.conversation_id], "metadata": stored.metadata}
