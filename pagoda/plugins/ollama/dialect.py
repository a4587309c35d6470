# SPDX-License-Identifier: Apache-2.0
"""The form of Ollama's errors and streams: one JSON object a line."""

from __future__ import annotations

from pagoda.api.dialect import Dialect
from pagoda.api.errors import ApiError
from pagoda.api.http.sse import encode_json


def line(value: object) -> bytes:
    """A line of a stream."""
    return encode_json(value) + b"\n"


def _error_body(error: ApiError) -> dict[str, str]:
    return {"error": error.message}


OLLAMA = Dialect(
    error_body=_error_body,
    error_event=lambda error: line(_error_body(error)),
    content_type="application/x-ndjson",
    keep_alive=b"",
)
