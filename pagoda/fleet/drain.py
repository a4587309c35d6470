# SPDX-License-Identifier: Apache-2.0
"""The end of a server that takes no new work: what it has accepted is done first.

A body may have many requests: `n` copies and inputs of embeddings, which come together, or the steps of a beam
search, which come one after the other. It is accepted as a whole with the first of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pagoda.errors import OverloadedError

_RETRY_AFTER_S = 10


class Drain:
    """The accepted work. Belongs to one event loop."""

    def __init__(self) -> None:
        self.has_begun = False
        """Only what belongs to an accepted body is accepted."""
        self._is_over = False
        self._bodies: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, body: str) -> None:
        """Counts a request as accepted, or what may send more of them. `body` is its id, empty for a request of
        its own."""
        self._bodies[body] += 1
        self._idle.clear()

    def leave(self, body: str) -> None:
        """Takes back one `enter`."""
        self._bodies[body] -= 1
        if not self._bodies[body]:
            del self._bodies[body]
        if not self._bodies:
            self._idle.set()

    @contextmanager
    def hold(self, body: str) -> Iterator[None]:
        """Accepts a body that sends its requests one after the other, until the block ends.
        Raises OverloadedError: as `check`."""
        self.check(body)
        self.enter(body)
        try:
            yield
        finally:
            self.leave(body)

    def check(self, body: str) -> None:
        """Raises OverloadedError: the server shuts down, and no work on this body has been accepted."""
        is_known = bool(body) and body in self._bodies and not self._is_over
        if self.has_begun and not is_known:
            raise OverloadedError("The server is shutting down.", retry_after_s=_RETRY_AFTER_S)

    async def run(self) -> None:
        """Takes no new work, and returns when all that was accepted has ended."""
        self.has_begun = True
        await self._idle.wait()

    def end(self) -> None:
        """Takes nothing any more, whatever it belongs to."""
        self.has_begun = self._is_over = True
