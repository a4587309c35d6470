# SPDX-License-Identifier: Apache-2.0
"""Errors whose text is one sentence that names the field, file or flag and what would be right.

The command line prints it and exits with code 2; the HTTP API turns an `InvalidRequestError` into an OpenAI error
object with status 400. Any other exception is a bug.
"""

from __future__ import annotations

from typing import NoReturn


class PagodaError(Exception):
    """Base of all errors whose text is meant for a person."""


class ConfigError(PagodaError):
    """A flag, a configuration file, a model directory or the machine does not allow what was asked."""


class InvalidRequestError(PagodaError, ValueError):
    """A request is refused at the door.

    `param` is the name of the field at fault, as the client spells it, or None for the body as a whole. `kind` is
    one word of a few, by which operators count them.
    """

    def __init__(
        self, message: str, *, param: str | None = None, kind: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.kind = kind


def refuse(param: str, rule: str, kind: str = "invalid_value") -> NoReturn:
    """Raises InvalidRequestError: the sentence begins with the name of the field and ends with `rule`."""
    raise InvalidRequestError(f"{param} {rule}.", param=param, kind=kind)


class OverloadedError(PagodaError):
    """The waiting queue is full; the client may come again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoReplicaError(OverloadedError):
    """No replica has taken requests for too long."""


class DeadlineError(PagodaError):
    """The request's deadline has passed before its answer was complete."""

    def __init__(self, message: str = "The request was not complete within its timeout.") -> None:
        super().__init__(message)


class SlowReaderError(DeadlineError):
    """Too much of the answer waits for a client that reads it too slowly."""


class EngineLostError(PagodaError):
    """The engine ended with this request in it; another may go on with the request's value."""


class EngineDeadError(PagodaError):
    """The engine ended and will not be started again."""


class TransportError(PagodaError):
    """Memory of another worker was not read, or not all of it: that one has gone, refuses, or is out of reach."""
