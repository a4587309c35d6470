# SPDX-License-Identifier: Apache-2.0
"""SGLang's handoffs: one request goes to a prefill and a decode server, with a room in which they meet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagoda.api.auth.keys import ApiKeys
from pagoda.api.errors import ApiError
from pagoda.messages.frontend import KVSource
from pagoda.messages.worker_config import Role
from pagoda.plugins.disaggregation import bootstrap
from pagoda.plugins.disaggregation.bootstrap import MAX_ROOMS, Rooms
from pagoda.plugins.disaggregation.handoffs import BootstrapHosts

SOURCE = KVSource(address="tcp://10.0.0.1:5700", engine_id="e1", transfer_id="t1", block_ids=(7,))


async def pair(serve_api, **config: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A prefill and a decode server, and the fields by which a router brings them together."""
    prefill = await serve_api("yes", role=Role.PREFILL, **config)
    hosts = {BootstrapHosts: BootstrapHosts(("127.0.0.1",))}
    decode = await serve_api("yes", role=Role.DECODE, options=hosts, **config)
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port, "bootstrap_room": 2**62}
    return prefill, decode, room


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_two_servers_meet(serve_api, route: str, first: str) -> None:
    prefill, decode, room = await pair(serve_api)
    order = (prefill, decode) if first == "prefill" else (decode, prefill)
    asked = []
    for api in order:
        asked.append(asyncio.create_task(getattr(api, route)(**room)))
        await asyncio.sleep(0)
    for answer in await asyncio.gather(*asked):
        assert answer.status == 200
    [held], [fetched] = prefill.endpoint.requests, decode.endpoint.requests
    assert (held.holds_kv, fetched.kv_source) == (True, SOURCE)


async def test_the_clients_key_is_handed_on(serve_api) -> None:
    prefill, decode, room = await pair(serve_api, api_keys=ApiKeys(["secret"]))
    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": "hi", **room}
    for api in (prefill, decode):
        assert (await api.post("/v1/completions", body, headers=headers)).status == 200
    assert decode.endpoint.requests[0].kv_source == SOURCE


async def test_a_prompt_that_nobody_computes_is_computed(serve_api, monkeypatch) -> None:
    monkeypatch.setattr(bootstrap, "WAIT_S", 0.0)
    prefill, decode, room = await pair(serve_api)
    for fields in (room, {**room, "bootstrap_port": 1}):
        assert (await decode.complete(**fields)).status == 200
    assert [request.kv_source for request in decode.endpoint.requests] == [None, None]
    assert not prefill.endpoint.requests


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"bootstrap_host": "10.0.0.9"}, "bootstrap_host"),
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_port": None}, "bootstrap_port"),
        ({"bootstrap_room": None}, "bootstrap_host"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"n": 2}, "n"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
async def test_fields_that_do_not_fit(serve_api, changes: dict[str, Any], param: str) -> None:
    """A decode server connects nowhere that its operator has not named."""
    _, decode, room = await pair(serve_api)
    assert (await decode.complete(**{**room, **changes})).error()["param"] == param


@pytest.mark.parametrize("role", [Role.NONE, Role.BOTH])
async def test_servers_of_other_roles_refuse_rooms(serve_api, role: Role) -> None:
    api = await serve_api(role=role)
    assert (await api.complete(bootstrap_room=5)).error()["param"] == "bootstrap_room"


@pytest.mark.parametrize("room", ["x", "-1", "1" * 30, "\u0661"])
async def test_rooms_that_cannot_be(api, room: str) -> None:
    assert (await api.get(f"/bootstrap/rooms/{room}")).status == 404


async def test_rooms_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(bootstrap, "WAIT_S", 0.0)
    rooms = Rooms()
    for room in range(MAX_ROOMS + 10):
        rooms.tell(room, SOURCE)
    assert len(rooms) == MAX_ROOMS
    assert await rooms.wait(MAX_ROOMS) == SOURCE
    with pytest.raises(ApiError):
        await rooms.wait(3)


async def test_the_later_request_of_a_room_counts() -> None:
    rooms = Rooms()
    other = KVSource(address="tcp://10.0.0.1:5700", engine_id="e1", transfer_id="t2")
    for source in (SOURCE, other):
        rooms.tell(5, source)
        assert await rooms.wait(5) == source
