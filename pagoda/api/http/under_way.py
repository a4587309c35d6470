# SPDX-License-Identifier: Apache-2.0
"""Requests of a kind that hold something while they are under way, of which there may be so many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pagoda.api.errors import ApiError


@dataclass
class UnderWay:
    """Counts requests of one kind."""

    what: str
    """Plural of what they are, as clients read it."""
    most: int
    most_of_key: int
    """The most of one API key."""
    _num_of: Counter[str] = field(default_factory=Counter)
    """Requests by the names of keys; none is 0."""

    @property
    def num_running(self) -> int:
        return self._num_of.total()

    @contextmanager
    def admit(self, key_name: str) -> Iterator[None]:
        """Counts a request until the context ends; `key_name` is empty on a server without keys.
        Raises ApiError: 429, there are as many as there may be, of all clients or of the key."""
        if self.num_running >= self.most:
            raise self._refusal(f"The server takes {self.most} {self.what} at a time.")
        if key_name and self._num_of[key_name] >= self.most_of_key:
            most = self.most_of_key
            raise self._refusal(f"The API key {key_name} may send {most} {self.what} at a time.")
        self._num_of[key_name] += 1
        try:
            yield
        finally:
            self._num_of[key_name] -= 1
            if not self._num_of[key_name]:
                del self._num_of[key_name]

    def _refusal(self, message: str) -> ApiError:
        headers, word = {"Retry-After": "1"}, f"max_{self.what}"
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers, word=word)
