"""Responses that are kept in memory, within bounds: the least recently used ones make room.

Each belongs to the API key that asked for it, and no other key finds it. A response knows the one before it by id
only, so that nothing is kept longer than the bounds allow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagoda.api.errors import ApiError
from pagoda.api.kept_json import kept_bytes
from pagoda.api.openai.responses.bodies import Item
from pagoda.api.openai.responses.events import EventLog
from pagoda.errors import OverloadedError, refuse
from pagoda.frontend.conversation import MAX_MESSAGES

if TYPE_CHECKING:
    from pagoda.api.openai.responses.background import BackgroundRun

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
        self.num_bytes = 0
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._item_owners: dict[tuple[str, str], str] = {}
        """Id of the last response that has an item, by the names of key and item."""
        self._running: set[StoredResponse] = set()

    def __len__(self) -> int:
        return len(self._responses)

    def check_room(self) -> None:
        """Raises OverloadedError: too many background responses run; they are never dropped."""
        if len(self._running) >= MAX_RUNNING_RESPONSES:
            raise OverloadedError(
                f"{MAX_RUNNING_RESPONSES} background responses run at a time; wait for one to finish."
            )
        if sum(stored.log.num_bytes for stored in self._running if stored.log) > self.max_bytes:
            raise OverloadedError(
                "The background responses that run fill the memory for responses."
            )

    def put(self, stored: StoredResponse) -> None:
        """Keeps a response, or keeps it anew after it has changed; others make room."""
        key = (stored.key_name, stored.response_id)
        self._forget(key)
        stored.num_bytes = _num_bytes(stored)
        if stored.num_bytes > self.max_bytes and not stored.is_running:
            return
        self._responses[key] = stored
        self.num_bytes += stored.num_bytes
        if stored.is_running:
            self._running.add(stored)
        stored.by_id = {item["id"]: item for item in stored.items}
        for item_id in stored.by_id:
            self._item_owners[stored.key_name, item_id] = key[1]
        self._make_room()

    def get(self, key_name: str, response_id: str) -> StoredResponse:
        """The response, which counts as used now. Raises ApiError: 404, the client has no such response."""
        stored = self._responses.get((key_name, response_id))
        if stored is None:
            message = f"Response with id {response_id[:128]!r} not found."
            raise ApiError(404, message, "response_id", "not_found")
        self._responses.move_to_end((key_name, response_id))
        return stored

    def remove(self, stored: StoredResponse) -> None:
        self._forget((stored.key_name, stored.response_id))

    def history(self, key_name: str, response_id: str | None) -> list[Item]:
        """The items of a response and of all before it, the first ones first.
        Raises ApiError: 400, one of them is not there any more, or still runs."""
        chain: list[StoredResponse] = []
        num_items = 0
        while response_id is not None:
            stored = self._responses.get((key_name, response_id))
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
            self._responses.move_to_end((key_name, response_id))
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
        stored = None if owner is None else self._responses.get((key_name, owner))
        item = None if stored is None else stored.by_id.get(item_id)
        if item is not None:
            return item
        raise ApiError(
            404, f"Item with id {item_id[:128]!r} not found.", f"{place}.id", "not_found"
        )

    async def close(self) -> None:
        """Cancels background responses."""
        for stored in list(self._running):
            if stored.run is not None:
                await stored.run.cancel()

    def _forget(self, key: tuple[str, str]) -> None:
        stored = self._responses.pop(key, None)
        if stored is None:
            return
        self.num_bytes -= stored.num_bytes
        self._running.discard(stored)
        for item_id in stored.by_id:
            owned = (stored.key_name, item_id)
            if self._item_owners.get(owned) == key[1]:
                del self._item_owners[owned]

    def _make_room(self) -> None:
        while self.num_bytes > self.max_bytes or len(self._responses) > MAX_STORED_RESPONSES:
            oldest = next(
                (k for k, stored in self._responses.items() if not stored.is_running), None
            )
            if oldest is None:
                return
            self._forget(oldest)


def _num_bytes(stored: StoredResponse) -> int:
    events = 0 if stored.log is None else stored.log.num_bytes
    return kept_bytes(stored.response) + stored.num_input_bytes + events
