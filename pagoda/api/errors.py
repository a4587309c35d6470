# SPDX-License-Identifier: Apache-2.0
"""Every error that a client sees, as an OpenAI error object."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagoda.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    PagodaError,
)
from pagoda.telemetry.logging import withheld
from pagoda.text.prompt_checks import PromptTooLongError

INTERNAL_ERROR = "The server made an error; its log says more."

_log = logging.getLogger(__name__)

_STATUSES = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", ""),
    403: ("permission_error", "forbidden"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "body_timeout"),
    409: ("invalid_request_error", ""),
    413: ("invalid_request_error", "body_too_long"),
    415: ("invalid_request_error", "unsupported_media_type"),
    416: ("invalid_request_error", "range_not_satisfiable"),
    417: ("invalid_request_error", "expectation_failed"),
    429: ("rate_limit_error", ""),
    431: ("invalid_request_error", "headers_too_long"),
    501: ("not_supported_error", "not_supported"),
    503: ("service_unavailable_error", ""),
    507: ("server_error", "insufficient_storage"),
}
"""OpenAI's type of error and Pagoda's kind of error for each status; others are errors of the server."""
_SERVER_ERROR = ("server_error", "internal_error")

CLIENTS_NAME = frozenset(("unknown_field", "duplicate_field"))
"""Kinds of errors whose `param` is not a field of the API but a name that a client made up."""


class GenerationError(Exception):
    """The engine failed with one request. The text is for the log, not for the client."""


@dataclass
class ApiError(Exception):
    """An error answer: HTTP status, one sentence, and the field or thing that the sentence is about."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    word: str = ""
    """The kind of the error, where neither code nor status determines it: the reason of a refusal, for example."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Numbers that the error is about, by llama.cpp's names."""

    @property
    def kind(self) -> str:
        """One word of a fixed set, for logs and metrics. Clients get `code`, with values of the OpenAI API."""
        return self.word or self.code or _STATUSES.get(self.status, _SERVER_ERROR)[1]

    def body(self) -> dict[str, object]:
        kind, _ = _STATUSES.get(self.status, _SERVER_ERROR)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def unavailable(reason: str, *, retry_after_s: int = 5) -> ApiError:
    return ApiError(
        503, reason, code="service_unavailable", headers={"Retry-After": str(retry_after_s)}
    )


def context_exceeded(
    message: str, param: str | None, num_prompt_tokens: int, context: int
) -> ApiError:
    """The prompt has no room in a context of so many tokens."""
    numbers = {"n_prompt_tokens": num_prompt_tokens, "n_ctx": context}
    return ApiError(400, message, param, "context_length_exceeded", numbers=numbers)


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """The answer to an exception. One without a text for users is a bug, which only the log tells."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return context_exceeded(str(error), error.param, error.num_tokens, error.context)
        case InvalidRequestError():
            return ApiError(400, str(error), error.param, word=error.kind)
        case NoReplicaError():
            return unavailable(str(error), retry_after_s=error.retry_after_s)
        case OverloadedError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return ApiError(
                429, str(error), code="rate_limit_exceeded", headers=headers, word="queue_full"
            )
        case DeadlineError():
            # The SDKs of OpenAI and Anthropic send a request again after 408, but for this header.
            return ApiError(
                408, str(error), code="request_timeout", headers={"x-should-retry": "false"}
            )
        case EngineDeadError():
            return unavailable(str(error))
        case PagodaError():
            return ApiError(500, str(error))
    # The reason for which an engine fails a request quotes nobody; the text of any other error may be a prompt's.
    told = error if isinstance(error, GenerationError) else withheld(error)
    _log.error("request failed", exc_info=told, extra={"request_id": request_id})
    return ApiError(500, INTERNAL_ERROR)
