"""The live page: snapshots as an event stream, and the list of running answers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from aiohttp import web

from pagoda.api.errors import ApiError, unavailable
from pagoda.api.live_stats import live_answers
from pagoda.api.request_context import RequestContext
from pagoda.api.sse import EventStream, event


async def live(context: RequestContext) -> web.StreamResponse:
    """A snapshot a second, until the client has enough or the server ends."""
    service = context.service
    endpoint = service.ready_generator().endpoint
    key_name = context.key_name or ""

    async def send(stream: EventStream) -> None:
        async with aclosing(service.live_stats.watch(endpoint)) as snapshots:
            async for snapshot in snapshots:
                values = {
                    "started": service.created,
                    "draining": service.draining,
                    "is_router": service.is_router,
                    **snapshot,
                    "num_answers": len(service.tracker.running_of(key_name)),
                    "answers": live_answers(service.tracker, key_name),
                }
                await stream.send(event(values))
        if not stream.is_open:
            raise unavailable("The server is shutting down.")

    return await context.stream(send)


async def list_requests(context: RequestContext) -> web.StreamResponse:
    tracker, key_name = context.service.tracker, context.key_name or ""
    total = len(tracker.running_of(key_name))
    data = live_answers(tracker, key_name)
    return context.json({"object": "list", "total": total, "data": data})


async def cancel_request(context: RequestContext) -> web.StreamResponse:
    """Ends an answer by its id, or all answers to a request by its `X-Request-Id`.

    Whoever waits for an answer gets what there is so far. A client ends only answers to requests with its own API
    key: `X-Request-Id` is for clients to choose, and ids of answers begin with it.
    """
    generator = context.service.ready_generator()
    wanted = context.path_argument
    running = context.service.tracker.running_of(context.key_name or "")
    found = [wanted] if wanted in running else []
    found += [r.request_id for r in running.values() if r.client_request.id == wanted]
    if not found:
        raise ApiError(
            404, f"There is no running request {wanted[:200]!r}.", code="request_not_found"
        )
    await asyncio.gather(*map(generator.endpoint.abort, found))
    return context.json({"id": wanted, "object": "request", "cancelled": found})
