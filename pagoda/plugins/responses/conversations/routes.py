# SPDX-License-Identifier: Apache-2.0
"""`/v1/conversations`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from pagoda.api.answers.kept_conversations import (
    ConversationStore,
    SizedItems,
    StoredConversation,
    check_room,
    sized,
)
from pagoda.api.bodies.fields import Metadata
from pagoda.api.bodies.items import Item, page_of_items
from pagoda.api.errors import ApiError
from pagoda.api.http.request_context import RequestContext
from pagoda.api.route import ANSWER, Route
from pagoda.errors import refuse
from pagoda.plugins.responses.items import kept_items
from pagoda.plugins.responses.state import ResponseState
from pagoda.plugins.responses.translation import ChatTranslation
from pagoda.text.templates.conversation import MAX_MESSAGES

Items = Annotated[list[Item], Meta(max_length=MAX_MESSAGES)]


class ConversationBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new conversation, new metadata for one, or new items of one."""

    items: Items | None = None
    metadata: Metadata | None = None


async def create_conversation(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(ConversationBody)
    store = context.service.state(ResponseState).conversations
    stored = StoredConversation(context.client_request.key_name, body.metadata or {})
    items = await context.caller.translate(partial(_checked, body))
    store.put(stored, items)
    return context.json(stored.object())


async def get_conversation(context: RequestContext) -> web.StreamResponse:
    """Answers with a conversation, its items, or one of them."""
    _, stored, parts = _found(context)
    match parts:
        case []:
            return context.json(stored.object())
        case ["items"]:
            page = page_of_items(list(stored.items.values()), context.http.query)
            return await context.sized_json(page, stored.num_bytes)
        case ["items", item_id]:
            return await context.sized_json(_item(stored, item_id), stored.sizes[item_id])
    raise _no_part(parts)


async def change_conversation(context: RequestContext) -> web.StreamResponse:
    """Sets the metadata of a conversation, or adds items to it."""
    store, stored, parts = _found(context)
    if parts not in ([], ["items"]):
        raise _no_part(parts)
    body = await context.parse(ConversationBody)
    if parts:
        if body.metadata is not None:
            refuse(
                "metadata", "is set at the conversation itself, not at its items", "unknown_field"
            )
        items = await context.caller.translate(partial(_checked, body))
        check_room(stored, len(items), "items")
        store.check_bytes(stored, items)
        num_before = len(stored.items)
        store.add(stored, items)
        added = list(stored.items.values())[num_before:]
        page = page_of_items(added, {"order": "asc", "limit": "100"})
        return await context.sized_json(page, context.client_request.num_body_bytes)
    if body.items is not None:
        refuse("items", "are added at the conversation's path with /items", "unknown_field")
    if body.metadata is not None:
        store.set_metadata(stored, body.metadata)
    return context.json(stored.object())


async def delete_conversation(context: RequestContext) -> web.StreamResponse:
    """Forgets a conversation, or one of its items."""
    store, stored, parts = _found(context)
    match parts:
        case []:
            store.remove(stored)
            deleted = {"id": stored.conversation_id, "object": "conversation.deleted"}
            return context.json({**deleted, "deleted": True})
        case ["items", item_id]:
            _item(stored, item_id)
            store.remove_item(stored, item_id)
            return context.json(stored.object())
    raise _no_part(parts)


def _found(context: RequestContext) -> tuple[ConversationStore, StoredConversation, list[str]]:
    """The conversation of the path, and what follows its id."""
    conversation_id, *parts = context.path_argument.split("/")
    store = context.service.state(ResponseState).conversations
    return store, store.get(context.client_request.key_name, conversation_id), parts


def _no_part(parts: list[str]) -> ApiError:
    path = "/".join(parts)[:64]
    return ApiError(404, f"A conversation has no route {path!r} for this method.")


def _item(stored: StoredConversation, item_id: str) -> dict[str, Any]:
    item = stored.items.get(item_id)
    if item is None:
        raise ApiError(404, f"Item with id {item_id[:128]!r} not found.", "item_id", "not_found")
    return item


def _checked(body: ConversationBody) -> SizedItems:
    """The items of a body. Raises InvalidRequestError: one is no item that a response can go on from."""
    translation = ChatTranslation()
    items = body.items or []
    for index, item in enumerate(items):
        translation.add_item(item, f"items[{index}]")
    return sized(kept_items(items, items))


ROUTES: dict[str, dict[str, Route]] = {
    "/v1/conversations": {
        "POST": Route(create_conversation, "Begins a conversation.", ANSWER, ConversationBody)
    },
    "/v1/conversations/*": {
        "GET": Route(get_conversation, "A conversation, or its items.", ANSWER, statuses=(404,)),
        "POST": Route(
            change_conversation,
            "Sets metadata, or adds items.",
            ANSWER,
            ConversationBody,
            statuses=(404,),
        ),
        "DELETE": Route(delete_conversation, "Forgets a conversation.", ANSWER, statuses=(404,)),
    },
}
