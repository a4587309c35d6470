"""The page at `/`: files of the package, the same for everybody. What they show is behind the API key."""

from __future__ import annotations

import os
from pathlib import Path

from aiohttp import web

from pagoda.api.errors import ApiError
from pagoda.api.request_context import RequestContext

_DIRECTORY = Path(__file__).parent / "ui"
_NAMES = frozenset(os.listdir(_DIRECTORY))
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


async def file(context: RequestContext) -> web.StreamResponse:
    """A file of the page, `index.html` where the route names none."""
    name = context.path_argument or "index.html"
    content_type = _TYPES.get(Path(name).suffix)
    if content_type is None or name not in _NAMES:
        raise ApiError(404, f"The page has no file {name[:200]!r}.")
    own = {"Content-Type": content_type, "X-Request-Id": context.request_id}
    return web.FileResponse(_DIRECTORY / name, headers={**_HEADERS, **own})
