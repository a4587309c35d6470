"""The page at `/`: files of the package, the same for everybody. What they show is behind the API key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import web

from pagoda.api.errors import ApiError
from pagoda.api.request_context import RequestContext

_DIRECTORY = Path(__file__).parent / "ui"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # A new version of Pagoda is seen at once; what has not changed is not sent again.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class _File:
    body: bytes
    content_type: str
    etag: str


@cache
def _files() -> dict[str, _File]:
    """The files by name. They are few and small, and are read once."""
    files = {}
    for path in _DIRECTORY.iterdir():
        if path.suffix in _TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            files[path.name] = _File(body, _TYPES[path.suffix], etag)
    return files


async def index(context: RequestContext) -> web.StreamResponse:
    return _answer(context, "index.html")


async def file(context: RequestContext) -> web.StreamResponse:
    return _answer(context, context.path_argument)


def _answer(context: RequestContext, name: str) -> web.Response:
    found = _files().get(name)
    if found is None:
        raise ApiError(404, f"The page has no file {name[:200]!r}.")
    headers = {**_HEADERS, "ETag": found.etag, "X-Request-Id": context.request_id}
    known = (tag.strip() for tag in context.http.headers.get("If-None-Match", "").split(","))
    if any(tag.removeprefix("W/") in (found.etag, "*") for tag in known):
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, headers={**headers, "Content-Type": found.content_type})
