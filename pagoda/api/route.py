# SPDX-License-Identifier: Apache-2.0
"""A route: the function that answers a path and method, and what `/openapi.json` says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pagoda.api.auth.keys import Scope
from pagoda.api.dialect import OPENAI, Dialect
from pagoda.api.errors import ApiError
from pagoda.api.http.request_context import RequestContext

OPEN: frozenset[Scope] = frozenset()
"""Needs no API key: monitoring need not be allowed to use the server, and pages ask for the key."""
ANSWER = frozenset((Scope.ANSWER,))
LOOK = frozenset((Scope.LOOK,))
OPERATE = frozenset((Scope.OPERATE,))
RUNNING = frozenset((Scope.ANSWER, Scope.OTHERS))
"""Running requests: the client's own, or all."""
ANY_KEY = frozenset((Scope.ANSWER, Scope.LOOK, Scope.OPERATE))

Handler = Callable[[RequestContext], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    """One method of one path."""

    handler: Handler
    summary: str
    """One line for the documentation."""
    scopes: frozenset[Scope]
    """Scopes of which an API key needs one; `OPEN` needs no key."""
    body: Any = None
    """Type of the JSON body; None if the route takes no JSON."""
    answer: Any = None
    """Type of the JSON answer; None if it is not described."""
    content_type: str = "application/json"
    """Type of the content of an answer in one piece."""
    dialect: Dialect = OPENAI
    """The form of errors and streams."""
    streams: bool = False
    """True if the body can ask for a stream."""
    is_queued: bool = False
    """True if answers wait for an engine: a full queue refuses them before the body is read, and they count
    against the limits of their API key."""
    needs_model: bool = False
    """True if, as with answers that wait for an engine, a client that comes while the model loads waits for it."""
    needs_body: bool = True
    """False if the JSON body may be left out."""
    takes_form: bool = False
    """True if the body is a form with files (multipart/form-data)."""
    is_polled: bool = False
    """True if programs ask it again and again; successful answers are logged at the level debug."""
    is_endless: bool = False
    """True for a stream without an end, so that HEAD is refused and clients leave in good order."""
    is_offered: bool = True
    """False for a route that only says why it is refused, which is not described."""
    statuses: tuple[int, ...] = ()
    """Statuses besides those that every route of its kind answers with."""


def refused(reason: str, dialect: Dialect = OPENAI) -> Route:
    """A route that changes another server and has no meaning here: 501 with the reason, a sentence."""

    async def refuse(context: RequestContext) -> web.StreamResponse:
        raise ApiError(501, f"{context.http.path[:200]} is not supported: {reason}")

    return Route(refuse, "Refused.", OPERATE, dialect=dialect, is_offered=False)
