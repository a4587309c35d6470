"""Several answers of one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pagoda.frontend.async_utils import cancel_all
from pagoda.frontend.text_generator import TextDelta, TextRequest
from pagoda.version import __version__

SYSTEM_FINGERPRINT = f"pagoda-{__version__}"
"""What the OpenAI API calls the configuration behind an answer."""

T = TypeVar("T")
R = TypeVar("R")


async def for_all(requests: Sequence[T], run: Callable[[T], Awaitable[R]]) -> list[R]:
    """The results in order; the first failure ends all of them and is raised."""
    tasks = [asyncio.ensure_future(run(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


class GenerationError(Exception):
    """The engine could not go on with a request; the text is for the log, not for the client."""


def check_delta(delta: TextDelta, request: TextRequest) -> None:
    """
    Raises:
        GenerationError: this request failed.
    """
    if delta.error is not None:
        raise GenerationError(f"{request.request.request_id}: {delta.error}")


class Usage:
    """Counts the tokens of a request with one or more prompts and `n` answers to each."""

    def __init__(self, requests: Sequence[TextRequest]) -> None:
        self._num_prompt_tokens = sum(
            request.num_prompt_tokens for request in requests if request.is_first
        )
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}

    def add(self, index: int, delta: TextDelta) -> None:
        """Counts what `delta` adds to answer `index`."""
        self._num_completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens:
            self._num_cached_tokens[index] = delta.num_cached_tokens

    def as_dict(self, requests: Sequence[TextRequest]) -> dict[str, Any]:
        """The `usage` object."""
        cached = sum(
            count for index, count in self._num_cached_tokens.items() if requests[index].is_first
        )
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
