"""Every error that a client sees, as an OpenAI error object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pagoda.errors import EngineDeadError, InvalidRequestError, OverloadedError, PagodaError
from pagoda.frontend.text_generator import PromptTooLongError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}


_KINDS = {
    400: "invalid_value",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_long",
    431: "headers_too_long",
    500: "internal_error",
}

CLIENTS_NAME = frozenset(("unknown_field", "duplicate_field"))
"""Kinds of errors whose `param` is not a field of the API but a name that a client made up."""


@dataclass
class ApiError(Exception):
    """An error answer: HTTP status, one sentence, and the field or thing that the sentence is about."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    word: str = ""
    """The kind of the error, where neither code nor status determines it."""

    @property
    def kind(self) -> str:
        """One word of a fixed set, for logs and metrics. Clients get `code`, with values of the OpenAI API."""
        return self.code or self.word or _KINDS.get(self.status, "")

    def body(self) -> dict[str, object]:
        """The OpenAI error object."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())


def unavailable(reason: str, *, retry_after_s: int = 5) -> ApiError:
    """503: the server cannot take this request now."""
    return ApiError(
        503, reason, code="service_unavailable", headers={"Retry-After": str(retry_after_s)}
    )


def as_api_error(error: Exception) -> ApiError | None:
    """The answer to an exception with a text for users; None if `error` is a bug."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return ApiError(400, str(error), error.param, "context_length_exceeded")
        case InvalidRequestError():
            return ApiError(400, str(error), error.param, word=error.kind)
        case OverloadedError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=headers)
        case EngineDeadError():
            return unavailable(str(error))
        case PagodaError():
            return ApiError(500, str(error))
    return None
