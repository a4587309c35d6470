# SPDX-License-Identifier: Apache-2.0
"""The API's part: handoffs that proxies arrange, with `kv_transfer_params` or in rooms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from pagoda.api.errors import ApiError
from pagoda.api.handoffs import Asked, RequestHandoff
from pagoda.api.http.request_context import RequestContext
from pagoda.api.plugin import ApiPlugin
from pagoda.api.route import ANSWER, Route
from pagoda.api.service import Service
from pagoda.errors import refuse
from pagoda.messages.frontend import KVSource
from pagoda.plugins.disaggregation.bootstrap import Rooms, ask, room_of
from pagoda.plugins.disaggregation.kv_transfer import handoff_of, transfer_fields


class BootstrapHosts(NamedTuple):
    """Prefill servers that requests with `bootstrap_room` may name."""

    names: tuple[str, ...]


class HandoffState:
    """The rooms of a server while it runs, and the `Handoffs` of its bodies."""

    def __init__(self, service: Service, _: Mapping[str, ApiPlugin]) -> None:
        self.rooms = Rooms()
        self._service = service
        service.handoffs = self

    async def handoff(self, asked: Asked) -> RequestHandoff:
        """The same as `Handoffs.handoff`."""
        body, role = asked.body, asked.role
        is_router = self._service.is_router
        handoff = handoff_of(body, role, max_tokens=asked.max_tokens, is_router=is_router)
        if asked.num_prompts != 1 and body.kv_transfer_params is None:
            handoff = RequestHandoff()
        hosts = self._service.config.option(BootstrapHosts) or BootstrapHosts(())
        room = room_of(body, role, hosts.names)
        if room is not None and role.holds_kv:
            handoff = RequestHandoff(holds_kv=True, on_kv_source=partial(self.rooms.tell, room))
        elif room is not None:
            source = await ask(body, asked.authorization, self._service.config.client_tls)
            handoff = RequestHandoff(kv_source=source)
        if handoff != RequestHandoff() and asked.num_prompts != 1:
            refuse("prompt", "must be a single prompt with kv_transfer_params")
        return handoff

    def fields(self, source: KVSource | None) -> dict[str, Any]:
        return transfer_fields(source)

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def close(self) -> None: ...


async def bootstrap_room(context: RequestContext) -> web.StreamResponse:
    """The place of the KV of the request in a room, for a decode server; waits some seconds for the request."""
    room = context.path_argument
    if not (room.isascii() and room.isdigit() and len(room) < 20):
        raise ApiError(404, f"There is no room {room[:200]!r}.")
    return context.json(await context.service.state(HandoffState).rooms.wait(int(room)))


ROUTES = {
    "/bootstrap/rooms/*": {
        "GET": Route(
            bootstrap_room, "The place of KV, for decode servers.", ANSWER, statuses=(404,)
        )
    }
}
API = ApiPlugin(
    routes=ROUTES, state=HandoffState, flags="pagoda.plugins.disaggregation.flags:BootstrapFlags"
)
