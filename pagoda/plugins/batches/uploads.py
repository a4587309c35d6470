# SPDX-License-Identifier: Apache-2.0
"""Uploads under way, and how many there may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pagoda.api.errors import ApiError

MAX_UPLOADS = 64
"""Uploads at a time; each has an open file."""
MAX_UPLOADS_OF_KEY = 16
"""Uploads at a time of one API key."""


class Uploads:
    """Counts the uploads that are under way."""

    def __init__(self) -> None:
        self._num_of: Counter[str] = Counter()
        """Uploads by the names of keys; none is 0."""

    @property
    def num_running(self) -> int:
        return self._num_of.total()

    @contextmanager
    def admit(self, key_name: str) -> Iterator[None]:
        """Counts an upload until the context ends; `key_name` is empty on a server without keys.
        Raises ApiError: 429, there are as many as there may be, of all clients or of the key."""
        if self.num_running >= MAX_UPLOADS:
            raise _refusal(f"The server takes {MAX_UPLOADS} uploads at a time.")
        if key_name and self._num_of[key_name] >= MAX_UPLOADS_OF_KEY:
            most = MAX_UPLOADS_OF_KEY
            raise _refusal(f"The API key {key_name} may send {most} uploads at a time.")
        self._num_of[key_name] += 1
        try:
            yield
        finally:
            self._num_of[key_name] -= 1
            if not self._num_of[key_name]:
                del self._num_of[key_name]


def _refusal(message: str) -> ApiError:
    return ApiError(
        429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"}, word="max_uploads"
    )
