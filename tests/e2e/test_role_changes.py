# SPDX-License-Identifier: Apache-2.0
"""Hosts of a router as processes, which are given other roles while they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from pod_processes import PodProcesses, fetched, long_bodies, until_free, until_hosts
from streams import stream_all, until_more


async def _patch(url: str, path: str, role: str) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession(url) as session,
        session.patch(path, json={"role": role}) as response,
    ):
        return response.status, await response.json()


async def _hosts(router: str) -> dict[int, dict[str, Any]]:
    """The hosts of a router by the ports at which it reaches them."""
    async with aiohttp.ClientSession(router) as session, session.get("/v1/hosts") as response:
        hosts = (await response.json())["data"]
    return {int(host["address"].rpartition(":")[2]): host for host in hosts}


def test_roles_change_under_load_and_no_request_is_lost(tmp_path: Path) -> None:
    """Both ways to change a role: at the host, and at the router. Streams go on, with the same tokens."""
    asked = long_bodies(16, 120)
    with ExitStack() as stack:
        pod = PodProcesses(tmp_path, stack)
        first = pod.host("prefill", "--role-changes")
        second = pod.host("decode", "--role-changes")
        plain = pod.host("decode")
        router = pod.route()

        async def change(received: Callable[[], int]) -> None:
            ids = {host["role"]: host["id"] for host in (await _hosts(router.base_url)).values()}
            await until_more(received, 20)
            status, answer = await _patch(first.base_url, "/v1/role", "decode")
            assert (status, answer["role"]) == (200, "decode")
            await until_more(received, 200)
            assert (await _patch(second.base_url, "/v1/role", "prefill"))[0] == 200
            await until_more(received, 200)
            status, answer = await _patch(router.base_url, f"/v1/hosts/{ids['prefill']}", "both")
            assert (status, answer["role"]) == (200, "both")
            await until_more(received, 200)
            path = f"/v1/hosts/{ids['prefill']}"
            assert (await _patch(router.base_url, path, "standby"))[0] == 200

        async def ask() -> None:
            await until_hosts(router.base_url, 3)
            alone = [{**body, "cache_salt": "alone"} for body in asked]
            expected = await stream_all(plain.base_url, alone)
            salted = [{**body, "cache_salt": "changed"} for body in asked]
            assert await stream_all(router.base_url, salted, change) == expected
            urls = [host.base_url for host in (first, second, plain)]
            await until_free(urls)
            roles = sorted(host["role"] for host in (await _hosts(router.base_url)).values())
            assert roles == ["decode", "prefill", "standby"]
            before = await fetched(plain.base_url)
            after = [{**body, "cache_salt": "after"} for body in asked]
            assert await stream_all(router.base_url, after) == expected
            assert await fetched(plain.base_url) > before  # of the host that became one for prompts

            status, answer = await _patch(plain.base_url, "/v1/role", "prefill")
            assert (status, answer["error"]["param"]) == (400, "role")
            assert "without --role-changes" in answer["error"]["message"]
            assert (await _patch(router.base_url, "/v1/role", "prefill"))[0] == 404
            assert (await _patch(router.base_url, "/v1/hosts/none", "decode"))[0] == 404

        asyncio.run(ask())
