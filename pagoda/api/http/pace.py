# SPDX-License-Identifier: Apache-2.0
"""Slowness of a long upload, which is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pagoda.api.errors import ApiError

MIN_BYTES_PER_S = 16384
"""Bytes per second that an upload must bring on average, beyond the time-out of bodies."""

T = TypeVar("T")


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
