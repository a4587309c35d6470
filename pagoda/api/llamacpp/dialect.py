"""The form of llama.cpp's errors and streams."""

from __future__ import annotations

from pagoda.api.dialect import Dialect
from pagoda.api.errors import ApiError
from pagoda.api.sse import event

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def _error_body(error: ApiError) -> dict[str, object]:
    kind = _TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": error.message, "type": kind}}


LLAMACPP = Dialect(
    error_body=_error_body,
    error_event=lambda error: b"error: " + event(_error_body(error)).removeprefix(b"data: "),
)
