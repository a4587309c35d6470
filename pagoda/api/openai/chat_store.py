# SPDX-License-Identifier: Apache-2.0
"""Chat completions that are kept in memory, as conversations are, each for the API key that asked for it."""

from __future__ import annotations

from pagoda.api.answers.kept_conversations import (
    MAX_CONVERSATIONS,
    ConversationStore,
    SizedItems,
    StoredConversation,
)
from pagoda.api.errors import ApiError


class ChatStore:
    """The chat completions of all clients."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds their memory; 0 keeps none."""
        self._kept = ConversationStore(max_bytes)
        self._ids: dict[str, dict[str, None]] = {}
        """Ids by the name of the key, oldest first; some may have made room."""

    def put(self, stored: StoredConversation, items: SizedItems) -> None:
        """Keeps a completion. Raises InvalidRequestError: it is larger than all that is kept."""
        self._kept.put(stored, items)
        ids = self._ids.setdefault(stored.key_name, {})
        ids[stored.conversation_id] = None
        if len(ids) > 2 * MAX_CONVERSATIONS:
            self.all_of(stored.key_name)

    def get(self, key_name: str, completion_id: str) -> StoredConversation:
        """Raises ApiError: 404, the client has no such completion."""
        try:
            return self._kept.get(key_name, completion_id)
        except ApiError:
            message = f"Chat completion with id {completion_id[:128]!r} not found."
            raise ApiError(404, message, "completion_id", "not_found") from None

    def set_metadata(self, stored: StoredConversation, metadata: dict[str, str]) -> None:
        self._kept.set_metadata(stored, metadata)

    def remove(self, stored: StoredConversation) -> None:
        self._kept.remove(stored)

    def all_of(self, key_name: str) -> list[StoredConversation]:
        """The completions of a key that are still there, oldest first."""
        found = []
        for completion_id in list(self._ids.get(key_name, ())):
            try:
                found.append(self._kept.get(key_name, completion_id))
            except ApiError:
                del self._ids[key_name][completion_id]
        return found
