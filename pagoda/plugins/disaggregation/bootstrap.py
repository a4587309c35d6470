# SPDX-License-Identifier: Apache-2.0
"""Handoffs as SGLang's routers arrange them: the same request goes to a prefill and a decode server, with a room.

The prefill server notes where the KV of the request in a room will be. The decode server asks it for that over
HTTP (`GET /bootstrap/rooms/ROOM` at `bootstrap_host`, `bootstrap_port`), and goes on as with `kv_transfer_params`.
It asks only hosts that its operator has named: clients could make it connect anywhere else.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import OrderedDict
from collections.abc import Sequence

import aiohttp
import msgspec

from pagoda.api.bodies.fields import GenerationFields
from pagoda.api.errors import ApiError
from pagoda.errors import refuse
from pagoda.ipc.addresses import bracketed
from pagoda.messages.frontend import KVSource
from pagoda.messages.worker_config import Role

MAX_ROOMS = 4096
"""Rooms that are remembered, whether their request or the question for it came first."""
WAIT_S = 5.0
"""Seconds that a question waits for its request: both are sent at the same time."""
_ASK_S = 2 * WAIT_S
_log = logging.getLogger(__name__)


class Rooms:
    """Places of KV by room, on the side that computes prompts."""

    def __init__(self) -> None:
        self._places: OrderedDict[int, asyncio.Future[KVSource]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def _place(self, room: int) -> asyncio.Future[KVSource]:
        place = self._places.get(room)
        if place is None:
            place = self._places[room] = asyncio.get_running_loop().create_future()
            while len(self._places) > MAX_ROOMS:
                self._places.popitem(last=False)[1].cancel()
        return place

    def tell(self, room: int, source: KVSource) -> None:
        """Notes where the KV of the request in a room will be; of two requests the later one counts."""
        if self._place(room).done():
            del self._places[room]
        self._place(room).set_result(source)

    async def wait(self, room: int) -> KVSource:
        """The place that was told. Raises ApiError: 404, no request in this room has come in time."""
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(self._place(room))
        except (TimeoutError, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ApiError(404, f"No request has come in the room {room}.") from None


def room_of(body: GenerationFields, role: Role, hosts: Sequence[str]) -> int | None:
    """The room of a body; None without one. `hosts` are those that may be asked.
    Raises InvalidRequestError: the fields do not go together or do not fit the server; names one."""
    if body.bootstrap_room is None:
        for name in ("bootstrap_host", "bootstrap_port"):
            if getattr(body, name) is not None:
                refuse(name, "needs bootstrap_room")
        return None
    if role not in (Role.PREFILL, Role.DECODE):
        refuse("bootstrap_room", f"needs --role prefill or decode; this server runs with {role}")
    if (body.n or 1) != 1:
        refuse("n", "must be 1 with bootstrap_room")
    if body.kv_transfer_params is not None:
        refuse("kv_transfer_params", "and bootstrap_room exclude each other")
    if role is Role.DECODE:
        if body.bootstrap_port is None:
            refuse("bootstrap_port", "must be the port of the prefill server's API")
        if body.bootstrap_host not in hosts:
            refuse("bootstrap_host", "must be one of those that --bootstrap-hosts names")
    return body.bootstrap_room


async def ask(
    body: GenerationFields, authorization: str, tls: ssl.SSLContext | None
) -> KVSource | None:
    """The place of a prompt's KV, asked of the prefill server, by https with `tls`; None if it does not say, and
    the prompt is computed."""
    scheme = "http" if tls is None else "https"
    place = f"{bracketed(body.bootstrap_host or '')}:{body.bootstrap_port}"
    url = f"{scheme}://{place}/bootstrap/rooms/{body.bootstrap_room}"
    headers = {"Authorization": authorization} if authorization else {}
    try:
        limit = aiohttp.ClientTimeout(total=_ASK_S)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.get(
                url, headers=headers, allow_redirects=False, ssl=True if tls is None else tls
            ) as answer,
        ):
            if answer.status != 200:
                _log.warning("%s does not say where the KV is: %d", url, answer.status)
                return None
            return msgspec.json.decode(await answer.read(), type=KVSource)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        _log.warning("%s cannot be asked where the KV is: %s", url, error or "it is silent")
        return None
