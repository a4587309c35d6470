# SPDX-License-Identifier: Apache-2.0
"""Deadlines of the requests of an engine, on the engine's clock."""

from __future__ import annotations

import heapq

_MIN_STALE = 64


class Deadlines:
    """A heap of deadlines, from which those of ended requests are removed late."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._deadlines: dict[str, float] = {}
        """Deadlines of live requests by id."""

    def add(self, request_id: str, deadline: float) -> None:
        """`deadline` is an instant; `remove` must follow when the request ends."""
        self._deadlines[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * len(self._deadlines) + _MIN_STALE:
            self._heap = [(at, request_id) for request_id, at in self._deadlines.items()]
            heapq.heapify(self._heap)

    def remove(self, request_id: str) -> None:
        """Forgets a request; one without a deadline is ignored."""
        self._deadlines.pop(request_id, None)

    def drain(self, now: float) -> list[str]:
        """Ids of the requests whose deadlines have passed, each once, earliest first."""
        passed = []
        while (first := self.next_event_at()) is not None and first <= now:
            _, request_id = heapq.heappop(self._heap)
            del self._deadlines[request_id]
            passed.append(request_id)
        return passed

    def next_event_at(self) -> float | None:
        """The earliest deadline; None without one."""
        while self._heap and self._deadlines.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
