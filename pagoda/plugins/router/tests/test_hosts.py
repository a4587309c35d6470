# SPDX-License-Identifier: Apache-2.0
"""`/v1/hosts` of a router over hosts that have joined it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from linked_hosts import KEYS, Host, join_discovery, until
from scripted_endpoint import TEXT, ScriptedEndpoint

from pagoda.errors import OverloadedError
from pagoda.fleet.fleet import Fleet
from pagoda.plugins.router.discovery.joins import JoinDiscovery, Membership
from pagoda.plugins.router.members import HostMembers, RouterConfig
from pagoda.plugins.router.pools import PoolConfig
from pagoda.text.text_generator import TextGenerator


@asynccontextmanager
async def routed(serve_api: Any, **config: object) -> AsyncIterator[tuple[Any, Host]]:
    """A router with an API, and a host of it that says `hello`."""
    discoveries: list[JoinDiscovery] = []

    def discover(context: object) -> JoinDiscovery:
        discoveries.append(join_discovery(context))  # type: ignore[arg-type]
        return discoveries[0]

    api = await serve_api(loading=True, **config)
    config = RouterConfig(discover, KEYS, {"": PoolConfig("m", "1")})
    fleet = api.service.fleet = Fleet(HostMembers(config))
    starting = asyncio.create_task(fleet.start())
    await until(lambda: bool(discoveries))
    host = Host(ScriptedEndpoint("hello"))
    membership = Membership(host.context, f"127.0.0.1:{discoveries[0].port}", KEYS, host.record)
    await starting
    api.service.generator = TextGenerator(fleet.dispatcher, TEXT, api.service.tracker)
    try:
        yield api, host
    finally:
        await membership.close()
        await host.close()
        await fleet.close()


async def hosts_of(api: Any) -> list[dict[str, object]]:
    answer = (await api.get("/v1/hosts")).json()
    assert answer["object"] == "list"
    return answer["data"]


async def test_a_host_is_listed_with_what_is_known_of_it(serve_api: Any) -> None:
    async with routed(serve_api) as (api, host):
        [listed] = await hosts_of(api)
        load, since = listed.pop("load"), listed.pop("since")
        while (round_trip_ms := listed.pop("round_trip_ms")) is None:
            [listed] = await hosts_of(api)
            del listed["load"], listed["since"]
        assert round_trip_ms > 0
        assert listed == {
            "id": host.identity.id,
            "object": "host",
            "address": host.address,
            "model": "tiny",
            "role": "none",
            "region": None,
            "price": 0.0,
            "roles": [],
            "state": "ready",
            "reason": None,
            "num_requests": 0,
        }
        assert load["num_blocks"] == 0
        assert 0 <= time.time() - since < 60


async def test_a_host_that_is_let_go_finishes_what_it_has(serve_api: Any) -> None:
    async with routed(serve_api) as (api, host):
        endpoint = host.endpoint
        endpoint.pause_after = 2
        asking = asyncio.create_task(api.complete(max_tokens=20))
        await endpoint.paused.wait()
        answer = await api.request("DELETE", f"/v1/hosts/{host.identity.id}")
        assert (answer.status, answer.json()["state"]) == (200, "leaving")
        [listed] = await hosts_of(api)
        assert (listed["state"], listed["num_requests"]) == ("leaving", 1)
        endpoint.go_on.set()
        assert (await asking).json()["choices"][0]["text"] == "hello"
        while await hosts_of(api):
            await asyncio.sleep(0.01)
        assert (await api.get("/health")).status == 503


async def test_an_id_that_is_not_known_is_refused(serve_api: Any) -> None:
    async with routed(serve_api) as (api, host):
        answer = await api.request("DELETE", "/v1/hosts/nobody")
        assert (answer.status, answer.error()["code"]) == (404, "host_not_found")
        assert (await api.request("DELETE", "/v1/hosts")).status == 405
        assert (await api.get(f"/v1/hosts/{host.identity.id}")).status == 405
        assert len(await hosts_of(api)) == 1


async def test_when_all_hosts_are_full_clients_are_told_when_to_come_again(serve_api: Any) -> None:
    async with routed(serve_api) as (api, host):
        host.endpoint.raises = OverloadedError("Full.", retry_after_s=7)
        answer = await api.complete()
        assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
        assert answer.error()["message"] == "The waiting queue is full."


async def test_a_server_that_is_no_router_has_no_hosts(api: Any) -> None:
    assert (await api.get("/v1/hosts")).status == 503  # it may become one
    api.service.fleet = SimpleNamespace(is_router=False)
    answer = await api.get("/v1/hosts")
    assert answer.status == 404
    assert answer.error()["message"] == "This server has no hosts; a router (pagoda route) has."
