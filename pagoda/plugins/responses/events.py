# SPDX-License-Identifier: Apache-2.0
"""The events of one response: numbered, encoded, and kept if they may be asked for later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pagoda.api.http.sse import EventStream, encode_json


class DeltaTemplate:
    """An event that is encoded once, for a stream of events that differ in their text and number."""

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        head = encode_json({"type": kind, **fields})[:-1]
        self._prefix = b'event: %b\ndata: %b,"delta":' % (kind.encode(), head)

    def fill(self, text: str, number: int) -> bytes:
        return b'%b%b,"sequence_number":%d}\n\n' % (self._prefix, encode_json(text), number)


class EventWriter:
    """Writes the events of one response in their order."""

    def __init__(self, on_event: Callable[[bytes], None] | None = None) -> None:
        """`on_event` gets each event; without it events wait for `take`."""
        self._pending: list[bytes] = []
        self._send = on_event or self._pending.append
        self._number = 0

    def write(self, kind: str, **fields: Any) -> None:
        body = {"type": kind, **fields, "sequence_number": self._number}
        self._emit(b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(body)))

    def write_delta(self, template: DeltaTemplate, text: str) -> None:
        self._emit(template.fill(text, self._number))

    def take(self) -> bytes:
        """The events since the last call."""
        events = b"".join(self._pending)
        self._pending.clear()
        return events

    def _emit(self, event: bytes) -> None:
        self._number += 1
        self._send(event)


class EventLog:
    """All events of a background response, for streams that begin at any of them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_closed = False
        self._changed = asyncio.Event()

    def append(self, event: bytes) -> None:
        self._events.append(event)
        self.num_bytes += len(event)
        self._tell()

    def close(self) -> None:
        """Lets streams end behind the last event."""
        self._is_closed = True
        self._tell()

    async def follow(self, stream: EventStream, first: int) -> None:
        """Writes the events from number `first` on, to the last one."""
        index = first
        while True:
            changed = self._changed
            while index < len(self._events):
                await stream.send(self._events[index])
                index += 1
            if self._is_closed:
                return
            await changed.wait()

    def _tell(self) -> None:
        """Wakes the streams that wait."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
