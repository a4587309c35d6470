# SPDX-License-Identifier: Apache-2.0
"""Conversations that are kept in memory, within bounds: the least recently used ones of who has most make room."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from pagoda.api.answers.kept_json import kept_bytes
from pagoda.api.auth.key_shares import LruByKey
from pagoda.api.bodies.items import Item, new_id
from pagoda.api.errors import ApiError
from pagoda.errors import refuse
from pagoda.text.templates.conversation import MAX_MESSAGES

MAX_CONVERSATIONS = 4096


@dataclass(eq=False)
class StoredConversation:
    """A conversation of one API key; no other key finds it."""

    key_name: str
    metadata: dict[str, str]
    items: dict[str, Item] = field(default_factory=dict)
    """The items by id, in their order."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes that each of them takes."""
    conversation_id: str = field(default_factory=lambda: new_id("conv"))
    created_at: int = field(default_factory=lambda: int(time.time()))
    num_bytes: int = 0

    def object(self) -> dict[str, Any]:
        return {
            "id": self.conversation_id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


def check_room(stored: StoredConversation, num_items: int, param: str) -> None:
    """Raises InvalidRequestError: so many more items do not fit; names `param`."""
    if len(stored.items) + num_items > MAX_MESSAGES:
        refuse(param, f"has too many items: a conversation has at most {MAX_MESSAGES}")


SizedItems = Sequence[tuple[Item, int]]
"""Items with ids, each with the bytes that it takes."""


def sized(items: Sequence[Item]) -> list[tuple[Item, int]]:
    """Takes time linear in the text of all items."""
    return [(item, kept_bytes(item)) for item in items]


class ConversationStore:
    """The conversations of all clients."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds the memory of all items; with 0 there are no conversations."""
        self.max_bytes = max_bytes
        self._kept: LruByKey[StoredConversation] = LruByKey()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._kept.bytes.total

    def put(self, stored: StoredConversation, items: SizedItems) -> None:
        """Keeps a conversation with its first items; others make room.
        Raises InvalidRequestError: it is larger than all that is kept."""
        num_bytes = kept_bytes(stored.metadata)
        self._check_bytes(num_bytes + _num_bytes(items))
        self._kept.put(stored.key_name, stored.conversation_id, stored, 0)
        self._resize(stored, num_bytes)
        self.add(stored, items)

    def get(self, key_name: str, conversation_id: str) -> StoredConversation:
        """The conversation, which counts as used now. Raises ApiError: 404, the client has none of this id."""
        stored = self._kept.get(key_name, conversation_id)
        if stored is None:
            message = f"Conversation with id {conversation_id[:128]!r} not found."
            raise ApiError(404, message, "conversation", "not_found")
        return stored

    def check_bytes(self, stored: StoredConversation, items: SizedItems) -> None:
        """Raises InvalidRequestError: with these items the conversation is larger than all that is kept."""
        self._check_bytes(stored.num_bytes + _num_bytes(items))

    def _check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            refuse(
                "items",
                f"and metadata take {num_bytes} bytes; the server keeps {self.max_bytes} bytes of conversations "
                "(--response-store-bytes)",
            )

    def set_metadata(self, stored: StoredConversation, metadata: dict[str, str]) -> None:
        change = kept_bytes(metadata) - kept_bytes(stored.metadata)
        stored.metadata = metadata
        self._resize(stored, change)

    def add(self, stored: StoredConversation, items: SizedItems) -> None:
        """Adds items, of which none replaces another."""
        for item, size in items:
            item_id = item["id"] if item["id"] not in stored.items else new_id("item")
            stored.items[item_id] = {**item, "id": item_id}
            stored.sizes[item_id] = size
        self._resize(stored, _num_bytes(items))

    def remove_item(self, stored: StoredConversation, item_id: str) -> None:
        del stored.items[item_id]
        self._resize(stored, -stored.sizes.pop(item_id))

    def remove(self, stored: StoredConversation) -> None:
        self._kept.pop(stored.key_name, stored.conversation_id)

    def _resize(self, stored: StoredConversation, change: int) -> None:
        """Counts bytes that came or went; those of a conversation that has been removed are not counted."""
        key = stored.key_name, stored.conversation_id
        if self._kept.get(*key) is None:
            return
        stored.num_bytes += change
        self._kept.put(*key, stored, stored.num_bytes)
        if stored.num_bytes > self.max_bytes:
            self.remove(stored)  # and no other one for its sake
        for _ in self._kept.make_room(self.max_bytes, MAX_CONVERSATIONS):
            pass


def _num_bytes(items: SizedItems) -> int:
    return sum(map(itemgetter(1), items))
