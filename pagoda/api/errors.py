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
"""Kinds of errors whose `param` is no field of the API, but whatever a client has made up."""


@dataclass
class ApiError(Exception):
    """An answer that is an error: a status, one sentence, and what it is about."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    word: str = ""
    """Its kind, where neither the code nor the status says it."""

    @property
    def kind(self) -> str:
        """One word of a few, for operators. Clients know them by `code`, which is only what the OpenAI API has."""
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
    """The answer to an exception that is meant for a person; None if `error` is a bug."""
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
