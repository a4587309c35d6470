"""`pagoda route` over hosts that join it: real processes, killed in the middle of many streams."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from streams import bodies, stream_all, until_more

from pagoda.cli.server_process import ServerProcess, server_process

NUM_STREAMS = 200
HOST = ["--threads", "1", "--dtype", "float32", "--max-num-seqs", "256", "--num-kv-blocks", "2048"]


class Pod:
    """A router and its hosts."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._key = directory / "key"
        self._key.write_text(secrets.token_hex())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"

    def add_host(self) -> ServerProcess:
        join = ["--join", self._address, "--cluster-key-file", str(self._key)]
        return self._stack.enter_context(server_process([*HOST, *join]))

    def route(self, *flags: str) -> ServerProcess:
        """A router, when a host has joined it."""
        listen = ["--join-listen", self._address, "--cluster-key-file", str(self._key)]
        return self._stack.enter_context(server_process([*listen, *flags], "route"))


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with ExitStack() as stack:
        yield Pod(tmp_path, stack)


async def until_hosts(url: str, count: int) -> None:
    async with aiohttp.ClientSession(url) as session:
        while True:
            async with session.get("/v1/load") as response:
                replicas = (await response.json())["replicas"]
            if sum(replica["state"] == "ready" for replica in replicas) == count:
                return
            await asyncio.sleep(0.05)


def test_a_host_is_killed_under_many_streams(pod: Pod) -> None:
    requests = bodies(NUM_STREAMS, 60)
    hosts = [pod.add_host(), pod.add_host()]
    router = pod.route("--policy", "least-pending-tokens")
    undisturbed = asyncio.run(stream_all(hosts[0].base_url, requests))

    async def ask() -> list[tuple[str, str]]:
        await until_hosts(router.base_url, 2)

        async def kill(received: Callable[[], int]) -> None:
            await until_more(received, 2000)
            os.kill(hosts[0].pid, signal.SIGKILL)
            await until_more(received, 1)

        answers = await stream_all(router.base_url, requests, kill)
        await until_hosts(router.base_url, 1)
        return answers

    disturbed = asyncio.run(ask())
    assert disturbed == undisturbed
    assert len(disturbed) == NUM_STREAMS
    assert {reason for _, reason in disturbed} == {"length"}


def test_a_host_that_is_asked_to_end_finishes_what_it_has(pod: Pod) -> None:
    requests = bodies(40, 60)
    hosts = [pod.add_host(), pod.add_host()]
    router = pod.route("--policy", "round-robin")

    async def ask() -> None:
        await until_hosts(router.base_url, 2)
        undisturbed = await stream_all(router.base_url, requests)

        async def end(received: Callable[[], int]) -> None:
            await until_more(received, 100)
            os.kill(hosts[1].pid, signal.SIGTERM)

        assert await stream_all(router.base_url, requests, end) == undisturbed
        assert await stream_all(router.base_url, requests) == undisturbed

    asyncio.run(ask())


def test_hosts_find_a_router_that_was_started_again(pod: Pod) -> None:
    requests = bodies(8, 8)
    pod.add_host()
    router = pod.route()
    before = asyncio.run(stream_all(router.base_url, requests))
    os.kill(router.pid, signal.SIGKILL)
    again = pod.route()
    assert asyncio.run(stream_all(again.base_url, requests)) == before
