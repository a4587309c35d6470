# SPDX-License-Identifier: Apache-2.0
"""Checks of a request before its route answers: where it comes from, what its key may do, what its body is."""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import HttpVersion11

from pagoda.api.errors import ApiError
from pagoda.api.http.request_context import RequestContext
from pagoda.api.route import Route

_OF_ANY_PAGE = frozenset(
    ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
)
"""Types of bodies that a browser lets any web page send anywhere without asking (the CORS-safelisted ones of
https://fetch.spec.whatwg.org/#cors-safelisted-request-header), and no type."""
_OWN_PAGE = "same-origin"
_SAFE = frozenset(("GET", "HEAD"))
"""Methods that change nothing (RFC 9110, 9.2.1)."""


def check_origin(context: RequestContext) -> None:
    """Refuses web pages of other origins, also those whose name was made to point here (DNS rebinding).
    Raises ApiError: 403; 400 without a Host header, which every browser sends."""
    http, config = context.http, context.service.config
    hosts = http.headers.getall("Host", ())
    if len(hosts) > 1 or (not hosts and http.version >= HttpVersion11):
        raise ApiError(400, "A request must have one Host header.", word="invalid_http")
    host = hosts[0] if hosts else None
    if host is not None and not config.allowed_hosts.allows(host):
        raise ApiError(
            403,
            f"This server does not answer for the host {host[:200]!r}; --allowed-hosts names more.",
        )
    origin = http.headers.get("Origin")
    if origin is None:
        return
    cors = config.cors_origins
    is_question = bool(cors) and http.method == "OPTIONS"
    if _netloc(origin) != (host or "").lower() and not is_question and not cors.allows(origin):
        raise _other_origin()


def _other_origin() -> ApiError:
    return ApiError(
        403,
        "Requests from web pages of other origins are refused; --cors-origins names those that may.",
    )


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None if it has none, as `null`."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def check_scope(context: RequestContext, route: Route) -> None:
    """Raises ApiError: 403, the client's key is not for this route."""
    if route.scopes and not context.scopes & route.scopes:
        needed = " or ".join(sorted(route.scopes))
        raise ApiError(
            403,
            f"The API key {context.key_name} is not for this route, which needs the scope {needed}.",
        )


def check_content_type(context: RequestContext, route: Route) -> None:
    """Refuses what web pages of others may send without asking; programs, as curl, may leave the type of JSON out.
    Raises ApiError: 403, a page that does not tell its origin changes something without a body; 415, a page of
    another origin sends a body of a type that any page may send, or the body is no form where one is needed."""
    http = context.http
    if not http.body_exists:
        if (
            http.method not in _SAFE
            and "Origin" not in http.headers
            and _is_of_another_page(context)
        ):
            raise _other_origin()
        return
    given = context.http.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if route.takes_form:
        if given != "multipart/form-data":
            raise ApiError(
                415, "The body must be a form, with `Content-Type: multipart/form-data`."
            )
    elif given in _OF_ANY_PAGE and _is_of_another_page(context):
        raise ApiError(
            415,
            "The body of a web page must be JSON with the header `Content-Type: application/json`, "
            f"got {given or 'no type'}.",
        )


def _is_of_another_page(context: RequestContext) -> bool:
    """True if a browser says that a page of another origin sends this: every browser sends `Origin` with a POST
    to another origin (https://fetch.spec.whatwg.org/#origin-header), newer ones `Sec-Fetch-Site` with all requests
    (https://w3c.github.io/webappsec-fetch-metadata/). No page can leave them out or change them."""
    headers = context.http.headers
    if any(site.strip() != _OWN_PAGE for site in headers.getall("Sec-Fetch-Site", ())):
        return True
    origin = headers.get("Origin")
    return origin is not None and _netloc(origin) != headers.get("Host", "").lower()
