"""What the page shows while a server runs: its snapshots as an event stream, and the answers that it gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec
from aiohttp import web

from pagoda.api.errors import ApiError, unavailable
from pagoda.api.live_stats import LiveSnapshot, live_answers
from pagoda.api.request_context import RequestContext
from pagoda.api.sse import EventStream, event


async def live(context: RequestContext) -> web.StreamResponse:
    """A snapshot a second, until the client has enough or the server ends."""
    service = context.service
    endpoint = service.ready_generator().endpoint

    async def send(stream: EventStream) -> None:
        snapshots = cast(AsyncGenerator[LiveSnapshot, None], service.live_stats.watch(endpoint))
        async with aclosing(snapshots):
            async for snapshot in snapshots:
                server = {
                    "started": service.created,
                    "draining": service.draining,
                    "is_router": service.is_router,
                }
                await stream.send(event({**server, **msgspec.structs.asdict(snapshot)}))
        if not stream.is_open:
            raise unavailable("The server is shutting down.")

    return await context.stream(send)


async def list_requests(context: RequestContext) -> web.StreamResponse:
    """The answers that are being given, oldest first."""
    tracker = context.service.tracker
    return context.json(
        {"object": "list", "total": len(tracker.running), "data": live_answers(tracker)}
    )


async def cancel_request(context: RequestContext) -> web.StreamResponse:
    """Ends an answer, or all answers to a request; whoever waits for them gets what there is so far.

    The id of an answer is chosen here, and ends it whoever asked for it. The name of a request is chosen by its
    client, and another client may have chosen the same: it means those that came with the same key.
    """
    generator = context.service.ready_generator()
    wanted = context.path_argument
    found = [
        record.request_id
        for record in list(context.service.tracker.running.values())
        if wanted == record.request_id
        or (
            record.client_request.id == wanted
            and record.client_request.key_name == context.key_name
        )
    ]
    if not found:
        raise ApiError(
            404, f"There is no running request {wanted[:200]!r}.", code="request_not_found"
        )
    await asyncio.gather(*map(generator.endpoint.abort, found))
    return context.json({"id": wanted, "object": "request", "cancelled": found})
