# SPDX-License-Identifier: Apache-2.0
"""`GET /openapi.json`: the routes in the OpenAPI format 3.1 (https://spec.openapis.org/oas/v3.1.1.html).

Everything follows from the table of routes and the types of bodies and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.bodies.body import neutral_values
from pagoda.api.bodies.ignored_fields import Hint
from pagoda.api.dialect import OPENAI
from pagoda.api.http.request_context import RequestContext
from pagoda.api.route import Route
from pagoda.version import __version__

Table = Mapping[str, Mapping[str, Route]]

_REASONS = {
    400: "A value is not as it must be; the message names the field.",
    401: "The API key is missing or wrong.",
    403: "The server does not accept the Host or Origin header, or the API key lacks the scope.",
    404: "There is no such thing or model.",
    405: "The path has other methods.",
    408: "The body came too slowly.",
    409: "The state does not allow it.",
    413: "The body is too long.",
    415: "A web page of another origin sent no JSON, or the body is no form where one is needed.",
    429: "The waiting queue is full; `Retry-After` says when to come again.",
    431: "The headers are too long.",
    500: "A bug, or the engine failed with the request.",
    501: "Not supported here, with the reason.",
    503: "The server is loading, shutting down or stuck; `Retry-After` says when to come again.",
    504: "A host did not do in time what it was told.",
}
_ALWAYS = (400, 401, 403, 405, 431, 500, 503)
"""Statuses of every route."""
_WITH_BODY = (404, 408, 413, 415, 429)
"""Statuses of routes that read a body."""
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OTHER_ERROR = {"type": "object"}


def document(table: Callable[[], Table]) -> Any:
    """The handler that describes the routes of a table. The argument is a function, as the handler itself is a
    route of the table."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(describe(table()))

    async def openapi(context: RequestContext) -> web.StreamResponse:
        return context.text(encoded().decode(), "application/json")

    return openapi


def describe(table: Table) -> dict[str, Any]:
    """The document of all routes."""
    routes = [route for methods in table.values() for route in methods.values()]
    types = {kind for route in routes for kind in (route.body, route.answer) if kind is not None}
    kinds = sorted(types, key=str)
    references, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    references_of = dict(zip(kinds, references, strict=True))
    for kind, reference in references_of.items():
        name = reference.get("$ref", "").rpartition("/")[2]
        if name:
            components[name]["properties"] = _arranged(kind, components[name])
    paths = {
        path.replace("*", "{id}"): {
            method.lower(): _operation(path, method, route, references_of)
            for method, route in methods.items()
            if route.is_offered
        }
        for path, methods in table.items()
        if any(route.is_offered for route in methods.values())
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pagoda", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _arranged(kind: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of a body in the order in which readers look for them: those that must be given, others of
    this route, those of other routes as well, and last those that are not supported, with the values they take."""
    fields = schema["properties"]
    neutral = {name: _neutral(note) for name, note in neutral_values(kind).items()}
    own_first = [name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())]
    names = dict.fromkeys([*schema.get("required", ()), *own_first, *fields])
    supported = {name: fields[name] for name in names if name in fields and name not in neutral}
    return {**supported, **neutral}


def _neutral(note: tuple[object, ...] | Hint) -> dict[str, Any]:
    """The schema of a field that is not supported."""
    if isinstance(note, Hint):
        return {"description": "Accepted without effect.", "default": None}
    refused = "Not supported: refused but for these values."
    return {"description": refused, "enum": _distinct(note), "default": None}


def _distinct(values: Sequence[object]) -> list[object]:
    """Null and the values, each once: 0 and 0.0 are one in JSON."""
    found: list[object] = [None]
    for value in values:
        if not any(
            value == one and isinstance(value, bool) is isinstance(one, bool) for one in found
        ):
            found.append(value)
    return found


def _operation(
    path: str, method: str, route: Route, references: Mapping[Any, Any]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{path.replace('*', 'id').replace('/', '_')}",
        "summary": route.summary,
        "tags": [_tag(path)],
        "responses": _responses(path, method, route, references),
    }
    if route.scopes:  # each alone is enough
        operation["security"] = [{}, *({"key": [scope]} for scope in sorted(route.scopes))]
    if path.endswith("*"):
        place = {"name": "id", "in": "path", "required": True}
        operation["parameters"] = [{**place, "schema": {"type": "string", "minLength": 1}}]
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.needs_body,
            "content": {"application/json": {"schema": references[route.body]}},
        }
    return operation


def _tag(path: str) -> str:
    """The API that a route is of."""
    first = path.split("/")[1]
    if path.startswith("/v1/messages"):
        return "Anthropic"
    if first == "api":
        return "Ollama"
    return "OpenAI" if first == "v1" else "Server"


def _responses(
    path: str, method: str, route: Route, references: Mapping[Any, Any]
) -> dict[str, Any]:
    schema = {} if route.answer is None else references[route.answer]
    content = {route.content_type: {"schema": schema}}
    if route.streams:
        stream = route.dialect.content_type.partition(";")[0]
        content[stream] = {"schema": {"type": "string"}}
    reads = method in ("POST", "PUT", "PATCH")
    statuses = {*_ALWAYS, *route.statuses, *(_WITH_BODY if reads else ())}
    if path.endswith("*"):
        statuses.add(404)
    error = _OPENAI_ERROR if route.dialect is OPENAI else _OTHER_ERROR
    failures = {
        str(status): {
            "description": _REASONS[status],
            "content": {"application/json": {"schema": error}},
        }
        for status in sorted(statuses)
    }
    return {"200": {"description": "The answer.", "content": content}, **failures}
