# SPDX-License-Identifier: Apache-2.0
"""The way in which an API writes errors and streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagoda.api.errors import ApiError
from pagoda.api.http.sse import event


def _openai_error_event(error: ApiError) -> bytes:
    return b"event: error\n" + event(error.body())


@dataclass(frozen=True)
class Dialect:
    """The form of errors and of streams; by default that of OpenAI, with server-sent events."""

    error_body: Callable[[ApiError], object] = ApiError.body
    """The JSON body of an error answer."""
    error_event: Callable[[ApiError], bytes] = _openai_error_event
    """The bytes of an error inside a running stream, which ends it."""
    content_type: str = "text/event-stream; charset=utf-8"
    keep_alive: bytes = b": keep-alive\n\n"
    """Bytes for an idle stream; empty where the form has none that clients skip."""


OPENAI = Dialect()
