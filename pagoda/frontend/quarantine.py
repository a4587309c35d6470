"""Tells requests that kill engines from requests that were only near: one suspect is tried at a time."""

from __future__ import annotations

from collections import deque

from pagoda.frontend.tracked_request import TrackedRequest


class Quarantine:
    """Admits one suspect after the other, in the order in which they came."""

    def __init__(self) -> None:
        self.suspect: TrackedRequest | None = None
        """The request that is being tried."""
        self._queue: deque[TrackedRequest] = deque()

    async def enter(self, tracked: TrackedRequest) -> bool:
        """Waits for the request's turn; False if the request was woken for another reason."""
        if self.suspect is None:
            self.suspect = tracked
        elif self.suspect is not tracked:
            self._queue.append(tracked)
            try:
                await tracked.wait()
            finally:
                if self.suspect is not tracked:
                    self._queue.remove(tracked)
        return self.suspect is tracked

    def clear(self, tracked: TrackedRequest) -> None:
        """Ends the trial of the request, if it was on trial: it got on, ended, or left its replica."""
        if self.suspect is tracked:
            self.suspect = self._queue.popleft() if self._queue else None
            if self.suspect is not None:
                self.suspect.wake()
