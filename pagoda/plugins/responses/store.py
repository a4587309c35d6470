# SPDX-License-Identifier: Apache-2.0
"""Responses that are kept in memory, within bounds: the least recently used ones of who has most make room.

Each belongs to the API key that asked for it, and no other key finds it. A response knows the one before it by id
only, so that nothing is kept longer than the bounds allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagoda.api.auth.key_shares import KeyShares, LruByKey
from pagoda.api.bodies.items import Item
from pagoda.api.errors import ApiError
from pagoda.errors import OverloadedError, refuse
from pagoda.plugins.responses.events import EventLog
from pagoda.text.templates.conversation import MAX_MESSAGES

if TYPE_CHECKING:
    from pagoda.plugins.responses.background import BackgroundRun

MAX_STORED_RESPONSES = 4096
MAX_HISTORY_ITEMS = 4 * MAX_MESSAGES
"""Most items of the responses before one; several may be one message, and `truncation` leaves out the first."""
MAX_RUNNING_RESPONSES = 256
"""Most background responses that run at a time."""


@dataclass(eq=False)
class StoredResponse:
    """A response, and what it was asked."""

    key_name: str
    response: dict[str, Any]
    """The object, as clients get it."""
    input_items: Sequence[Item]
    """The items of its own input, with ids; those of earlier responses are not among them."""
    num_input_bytes: int = 0
    """Bytes that these take."""
    run: BackgroundRun | None = None
    """The work on a background response; None when it is done."""
    log: EventLog | None = None
    """The events of a background response that was asked for as a stream."""
    num_bytes: int = field(default=0, init=False)
    by_id: dict[str, Item] = field(default_factory=dict, init=False)
    """The items by their ids, since the response was kept."""

    @property
    def response_id(self) -> str:
        response_id: str = self.response["id"]
        return response_id

    @property
    def is_running(self) -> bool:
        return self.run is not None

    @property
    def current(self) -> dict[str, Any]:
        """The object as it is now."""
        return self.response if self.run is None else self.run.answer.object()

    @property
    def items(self) -> list[Item]:
        """Input and output, as the next response reads them."""
        return [*self.input_items, *self.response["output"]]


class ResponseStore:
    """The responses of all clients."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds their memory; 0 keeps none."""
        self.max_bytes = max_bytes
        self._kept: LruByKey[StoredResponse] = LruByKey()
        """Responses that do not run."""
        self._running: dict[tuple[str, str], StoredResponse] = {}
        """Responses that run, by the names of key and response."""
        self._running_of, self._running_bytes = KeyShares(), KeyShares()
        self._item_owners: dict[tuple[str, str], str] = {}
        """Id of the last response that has an item, by the names of key and item."""

    def __len__(self) -> int:
        return len(self._kept) + len(self._running)

    @property
    def num_bytes(self) -> int:
        return self._kept.bytes.total + self._running_bytes.total

    def check_room(self, key_name: str) -> None:
        """Raises OverloadedError: too many background responses run, of all clients or of the key; they are never
        dropped."""
        if not self._running_of.has_room(key_name, MAX_RUNNING_RESPONSES):
            raise OverloadedError(
                f"{self._running_of.of(key_name)} background responses of {self._running_of.total} that run are "
                f"yours, of at most {MAX_RUNNING_RESPONSES}; a key may have as many as it leaves free. Wait for "
                "one to finish."
            )
        logs = KeyShares()
        for stored in self._running.values():
            logs.change(stored.key_name, 0 if stored.log is None else stored.log.num_bytes)
        if not logs.has_room(key_name, self.max_bytes, 0):
            raise OverloadedError(
                "The background responses that run fill the memory for responses, or your key's part of it."
            )

    def put(self, stored: StoredResponse, num_response_bytes: int) -> None:
        """Keeps a response whose object takes so many bytes, or keeps it anew after it has changed; others make
        room."""
        self.remove(stored)
        num_events_bytes = 0 if stored.log is None else stored.log.num_bytes
        stored.num_bytes = num_response_bytes + stored.num_input_bytes + num_events_bytes
        key_name, response_id = stored.key_name, stored.response_id
        if stored.is_running:
            self._running[key_name, response_id] = stored
            self._running_of.change(key_name, 1)
            self._running_bytes.change(key_name, stored.num_bytes)
        elif stored.num_bytes > self.max_bytes:
            return
        else:
            self._kept.put(key_name, response_id, stored, stored.num_bytes)
        stored.by_id = {item["id"]: item for item in stored.items}
        for item_id in stored.by_id:
            self._item_owners[key_name, item_id] = response_id
        room = self.max_bytes - self._running_bytes.total
        for dropped in self._kept.make_room(room, MAX_STORED_RESPONSES - len(self._running)):
            self._disown(dropped)

    def _find(self, key_name: str, response_id: str) -> StoredResponse | None:
        """The response, which counts as used now."""
        running = self._running.get((key_name, response_id))
        return running or self._kept.get(key_name, response_id)

    def get(self, key_name: str, response_id: str) -> StoredResponse:
        """The response, which counts as used now. Raises ApiError: 404, the client has no such response."""
        stored = self._find(key_name, response_id)
        if stored is None:
            message = f"Response with id {response_id[:128]!r} not found."
            raise ApiError(404, message, "response_id", "not_found")
        return stored

    def remove(self, stored: StoredResponse) -> None:
        key_name, response_id = stored.key_name, stored.response_id
        found = self._running.pop((key_name, response_id), None)
        if found is not None:
            self._running_of.change(key_name, -1)
            self._running_bytes.change(key_name, -found.num_bytes)
        else:
            found = self._kept.pop(key_name, response_id)
        if found is not None:
            self._disown(found)

    def history(self, key_name: str, response_id: str | None) -> list[Item]:
        """The items of a response and of all before it, the first ones first.
        Raises ApiError: 400, one of them is not there any more, or still runs."""
        chain: list[StoredResponse] = []
        num_items = 0
        while response_id is not None:
            stored = self._find(key_name, response_id)
            if stored is None:
                which = "Previous response" if not chain else "An earlier response,"
                raise ApiError(
                    400,
                    f"{which} with id {response_id[:128]!r} not found.",
                    "previous_response_id",
                    "previous_response_not_found",
                )
            if stored.is_running:
                message = f"Previous response with id {response_id!r} is not finished."
                raise ApiError(400, message, "previous_response_id")
            chain.append(stored)
            num_items += len(stored.by_id)
            if num_items > MAX_HISTORY_ITEMS:
                refuse(
                    "previous_response_id",
                    f"leads to more than {MAX_HISTORY_ITEMS} items of earlier responses",
                )
            response_id = stored.response["previous_response_id"]
        return [item for stored in reversed(chain) for item in stored.items]

    def item(self, key_name: str, item_id: str, place: str) -> Item:
        """The item that a client refers to. Raises ApiError: 404, the client has no such item."""
        owner = self._item_owners.get((key_name, item_id))
        stored = None if owner is None else self._find(key_name, owner)
        item = None if stored is None else stored.by_id.get(item_id)
        if item is not None:
            return item
        raise ApiError(
            404, f"Item with id {item_id[:128]!r} not found.", f"{place}.id", "not_found"
        )

    async def close(self) -> None:
        """Cancels background responses."""
        for stored in list(self._running.values()):
            if stored.run is not None:
                await stored.run.cancel()

    def _disown(self, stored: StoredResponse) -> None:
        """Forgets whose the items of a response are that is not kept any more."""
        for item_id in stored.by_id:
            owned = (stored.key_name, item_id)
            if self._item_owners.get(owned) == stored.response_id:
                del self._item_owners[owned]
