# SPDX-License-Identifier: Apache-2.0
"""Limits of API keys: requests at a time, requests and tokens per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pagoda.api.auth.keys import ApiKey
from pagoda.api.errors import ApiError
from pagoda.errors import OverloadedError
from pagoda.telemetry.request_tracker import RequestStatistics, RequestTracker

_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """A token bucket that holds a minute's worth. It may go below zero: what is spent is known late."""

    limit: int
    level: float
    filled_at: float
    """Seconds, on the clock of `KeyLimits`."""

    def fill(self, limit: int, now: float) -> None:
        gained = (now - self.filled_at) * limit / _MINUTE_S
        self.level = min(limit, self.level + gained)
        self.limit, self.filled_at = limit, now

    def until_s(self, level: float) -> float:
        """Seconds until the bucket has `level` again."""
        return max(0.0, level - self.level) * _MINUTE_S / self.limit


@dataclass(slots=True)
class _Usage:
    num_running: int = 0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None


class KeyLimits:
    """Counts what each key uses, and refuses what goes beyond its limits.

    Tokens count as they are known: those of a prompt when its answer begins to wait, those of an answer as they
    come. A key that has spent more than it has is refused until that is made good; what runs goes on.
    """

    def __init__(
        self, tracker: RequestTracker, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._usages: dict[str, _Usage] = {}
        """Usages by the names of keys; only keys with limits, which are those of a file, have one."""
        tracker.subscribe(on_start=self._on_start, on_tokens=self._on_tokens)

    @contextmanager
    def admit(self, key: ApiKey) -> Iterator[None]:
        """Counts a request until the context ends; one that the queue refuses does not count for
        `requests_per_minute`. Raises ApiError: 429, a limit of the key is reached."""
        usage = self._usage_of(key)
        if usage is None:
            yield
            return
        most = key.max_concurrent_requests
        if most is not None and usage.num_running >= most:
            raise _refusal(key, "max_concurrent_requests", f"{most} requests at a time", 1.0)
        if usage.tokens is not None and usage.tokens.level <= 0:
            wait_s = usage.tokens.until_s(1)
            rule = f"{usage.tokens.limit} tokens per minute"
            raise _refusal(key, "tokens_per_minute", rule, wait_s)
        if usage.requests is not None:
            if usage.requests.level < 1:
                wait_s = usage.requests.until_s(1)
                rule = f"{usage.requests.limit} requests per minute"
                raise _refusal(key, "requests_per_minute", rule, wait_s)
            usage.requests.level -= 1
        bucket = usage.requests
        release = self.hold(key)
        try:
            yield
        except OverloadedError:
            if bucket is not None:
                bucket.level = min(bucket.limit, bucket.level + 1)
            raise
        finally:
            release()

    def hold(self, key: ApiKey) -> Callable[[], None]:
        """Counts work that goes on behind its request for `max_concurrent_requests`, until what is returned is
        called."""
        usage = self._usage_of(key)
        if usage is None:
            return lambda: None
        usage.num_running += 1

        def release() -> None:
            usage.num_running -= 1

        return release

    def until_half_s(self, key: ApiKey) -> float:
        """Seconds until half of the key's tokens of a minute are there: what has time leaves the other half to
        requests that somebody waits for."""
        usage = self._usage_of(key)
        if usage is None or usage.tokens is None:
            return 0.0
        return usage.tokens.until_s(usage.tokens.limit / 2)

    def headers(self, key: ApiKey | None) -> dict[str, str]:
        """OpenAI's headers that tell clients what is left of their limits; none for a key without limits."""
        usage = None if key is None else self._usage_of(key)
        if usage is None:
            return {}
        told: dict[str, str] = {}
        for what, bucket in (("requests", usage.requests), ("tokens", usage.tokens)):
            if bucket is not None:
                told |= {
                    f"x-ratelimit-limit-{what}": str(bucket.limit),
                    f"x-ratelimit-remaining-{what}": str(max(0, math.floor(bucket.level))),
                    f"x-ratelimit-reset-{what}": f"{bucket.until_s(bucket.limit):.3f}s",
                }
        return told

    def _usage_of(self, key: ApiKey) -> _Usage | None:
        limits = key.max_concurrent_requests, key.requests_per_minute, key.tokens_per_minute
        if limits == (None, None, None):
            return None
        usage = self._usages.get(key.name)
        if usage is None:
            usage = self._usages[key.name] = _Usage()
        now = self._clock()
        usage.requests = _filled(usage.requests, key.requests_per_minute, now)
        usage.tokens = _filled(usage.tokens, key.tokens_per_minute, now)
        return usage

    def _on_start(self, record: RequestStatistics) -> None:
        num_tokens = record.num_prompt_tokens + record.num_encoded_positions
        self._spend(record.client_request.key_name, num_tokens)

    def _on_tokens(self, record: RequestStatistics, num_tokens: int, _: int, __: bool) -> None:
        self._spend(record.client_request.key_name, num_tokens)

    def _spend(self, name: str, num_tokens: int) -> None:
        usage = self._usages.get(name)
        if usage is not None and usage.tokens is not None:
            usage.tokens.level -= num_tokens


def _filled(bucket: _Bucket | None, limit: int | None, now: float) -> _Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return _Bucket(limit, limit, now)
    bucket.fill(limit, now)
    return bucket


def _refusal(key: ApiKey, word: str, rule: str, wait_s: float) -> ApiError:
    return ApiError(
        429,
        f"The API key {key.name} may send {rule}.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(max(1, math.ceil(wait_s)))},
        word=word,
    )
