# SPDX-License-Identifier: Apache-2.0
"""The form of llama.cpp's errors and streams."""

from __future__ import annotations

from pagoda.api.dialect import Dialect
from pagoda.api.errors import ApiError
from pagoda.api.http.sse import event

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def _type_of(error: ApiError) -> str:
    if error.code == "context_length_exceeded":
        return "exceed_context_size_error"
    return _TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )


def _error_body(error: ApiError) -> dict[str, object]:
    kind = _type_of(error)
    return {
        "error": {"code": error.status, "message": error.message, "type": kind, **error.numbers}
    }


def _chat_error_body(error: ApiError) -> dict[str, object]:
    """OpenAI's error object with llama.cpp's type, and its numbers if there are any."""
    told = {"message": error.message, "type": _type_of(error), "param": error.param}
    return {"error": {**told, "code": error.code, **error.numbers}}


LLAMACPP_CHAT = Dialect(error_body=_chat_error_body)
"""The form of conversations at llama.cpp's paths: OpenAI's, but for types of errors."""
LLAMACPP = Dialect(
    error_body=_error_body,
    error_event=lambda error: b"error: " + event(_error_body(error)).removeprefix(b"data: "),
)
