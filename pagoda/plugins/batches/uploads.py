# SPDX-License-Identifier: Apache-2.0
"""Uploads under way: how many there may be, and how slow each may be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pagoda.api.errors import ApiError

MAX_UPLOADS = 64
"""Uploads at a time; each has an open file."""
MAX_UPLOADS_OF_KEY = 16
"""Uploads at a time of one API key."""
MIN_BYTES_PER_S = 16384
"""Bytes per second that an upload must bring on average, beyond the time-out of bodies."""

T = TypeVar("T")


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


class Pace:
    """The time that one upload may take, without what the server's disk takes of it."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` bounds the wait for anything at all, and how long a slow sender may be behind."""
        self._timeout_s = timeout_s
        self._waited_s = 0.0
        self.num_bytes = 0
        """Bytes that have come."""

    async def wait(self, reading: Coroutine[Any, Any, T]) -> T:
        """The result of `reading`. Raises ApiError: 408, it does not come in time."""
        now = asyncio.get_running_loop().time
        left_s = self._timeout_s + self.num_bytes / MIN_BYTES_PER_S - self._waited_s
        began = now()
        try:
            return await asyncio.wait_for(reading, min(self._timeout_s, left_s))
        except TimeoutError:
            if left_s < self._timeout_s:
                rate = f"{MIN_BYTES_PER_S} bytes a second"
                raise ApiError(408, f"The upload is slower than {rate}.") from None
            message = f"The body did not arrive within {self._timeout_s:.0f} s."
            raise ApiError(408, message) from None
        finally:
            self._waited_s += now() - began


def _refusal(message: str) -> ApiError:
    return ApiError(
        429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"}, word="max_uploads"
    )
