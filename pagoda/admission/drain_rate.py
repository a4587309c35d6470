# SPDX-License-Identifier: Apache-2.0
"""The rate at which a waiting queue drains, from which refused clients learn when to come again."""

from __future__ import annotations

import math

from pagoda.ipc.clock import Clock

HORIZON_S = 10.0
"""Age in seconds at which drained tokens count 1/e."""
MAX_RETRY_AFTER_S = 60
"""Clients of OpenAI's and Anthropic's SDKs ignore a longer `Retry-After`."""


class DrainRate:
    """Tokens that leave the queue per second, as an exponentially weighted mean over `HORIZON_S`.

    `restart` must come before all else.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_at = self._decayed_at = 0.0
        self._num_tokens = 0.0

    def restart(self) -> None:
        """The queue was empty until now: time without work says nothing of the rate."""
        self._began_at = self._decayed_at = self._clock.now()
        self._num_tokens = 0.0

    def drained(self, num_tokens: int) -> None:
        """Counts tokens that have left the queue to be computed."""
        self._decay()
        self._num_tokens += num_tokens

    def retry_after_s(self, num_waiting_tokens: int) -> int:
        """Whole seconds in which so many tokens drain, from 1 to `MAX_RETRY_AFTER_S`."""
        if not num_waiting_tokens:
            return 1
        self._decay()
        window_s = HORIZON_S * -math.expm1((self._began_at - self._decayed_at) / HORIZON_S)
        if window_s <= 0:
            return 1
        if self._num_tokens <= 0:
            waited_s = self._decayed_at - self._began_at
        else:
            waited_s = num_waiting_tokens * window_s / self._num_tokens
        return max(1, math.ceil(min(waited_s, MAX_RETRY_AFTER_S)))

    def _decay(self) -> None:
        now = self._clock.now()
        self._num_tokens *= math.exp((self._decayed_at - now) / HORIZON_S)
        self._decayed_at = now
