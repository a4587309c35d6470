# SPDX-License-Identifier: Apache-2.0
"""The files of the page and the stream of what it shows."""

from __future__ import annotations

import os
from contextlib import aclosing
from pathlib import Path

from aiohttp import web

from pagoda.api.answers.running_answers import running_answers
from pagoda.api.errors import ApiError, unavailable
from pagoda.api.http.request_context import RequestContext
from pagoda.api.http.sse import EventStream, event
from pagoda.plugins.page.state import PageState

_PAGE = Path(__file__).parent / "files"
"""The same for everybody; what they show is behind the API key."""
_PAGE_FILES = frozenset(os.listdir(_PAGE))
_PAGE_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE_HEADERS = {
    # A new version of Pagoda is seen at once; what has not changed is not sent again.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def page(context: RequestContext) -> web.StreamResponse:
    """A file of the page, `index.html` where the route names none."""
    return _file(context, context.path_argument or "index.html")


async def docs(context: RequestContext) -> web.StreamResponse:
    """The page of routes."""
    return _file(context, "docs.html")


def _file(context: RequestContext, name: str) -> web.StreamResponse:
    content_type = _PAGE_TYPES.get(Path(name).suffix)
    if content_type is None or name not in _PAGE_FILES:
        raise ApiError(404, f"The page has no file {name[:200]!r}.")
    own = {"Content-Type": content_type, **context.headers}
    return web.FileResponse(_PAGE / name, headers={**_PAGE_HEADERS, **own})


async def live(context: RequestContext) -> web.StreamResponse:
    """A snapshot a second, until the client has enough or the server ends."""
    service = context.service
    state = service.state(PageState)
    watched = state.watched
    pools = [] if service.fleet is None else [name for name in service.fleet.pools if name]

    async def send(stream: EventStream) -> None:
        async with aclosing(state.live_stats.watch(watched)) as snapshots:
            async for snapshot in snapshots:
                values = {
                    "started": service.created,
                    "draining": service.draining,
                    "is_router": service.is_router,
                    "pools": pools,
                    **snapshot,
                    "num_answers": len(context.running),
                    "answers": running_answers(context.running, service.tracker.clock_ns()),
                }
                await stream.send(event(values))
        if not stream.is_open:
            raise unavailable("The server is shutting down.")

    return await context.stream(send)
