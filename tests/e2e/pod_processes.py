"""Hosts with roles and a router as processes, and a proxy of the kind that others have, to ask them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from pagoda.cli.server_process import ServerProcess, server_process

HOST = ["--dtype", "float32", "--threads", "1", "--num-kv-blocks", "2048", "--block-size", "16"]
LEASE_S = 2
QUIET = ["--log-level", "warning"]


class PodProcesses:
    """Starts hosts that join one address, and routers that listen there; all of them end with `stack`."""

    def __init__(self, directory: Path, stack: ExitStack, address: str = "127.0.0.1") -> None:
        self._stack = stack
        self._key = directory / "key"
        self._key.write_text(secrets.token_hex())
        with socket.socket() as free:
            free.bind((address, 0))
            self._join = f"{address}:{free.getsockname()[1]}"

    def host(self, role: str, *flags: str, advertise: str = "127.0.0.1") -> ServerProcess:
        lease = [] if role == "none" else ["--role", role, "--kv-lease", str(LEASE_S)]
        join = [
            "--join",
            self._join,
            "--cluster-key-file",
            str(self._key),
            "--advertise",
            advertise,
        ]
        process = server_process([*HOST, *lease, *join, *QUIET, *flags])
        return self._stack.enter_context(process)

    def route(self, *flags: str) -> ServerProcess:
        """Returns a router that a host has joined."""
        listen = ["--join-listen", self._join, "--cluster-key-file", str(self._key)]
        few = ["--remote-prefill-min-tokens", "32", "--policy", "round-robin"]
        return self._stack.enter_context(server_process([*listen, *few, *QUIET, *flags], "route"))


class Crowd:
    """Some hosts of each role behind a router. Tests kill them and fill the gaps."""

    def __init__(self, pod: PodProcesses, sizes: Mapping[str, int]) -> None:
        """`sizes` gives the number of hosts of each role."""
        self._pod = pod
        self._sizes = sizes
        self.hosts: dict[str, list[ServerProcess]] = {role: [] for role in sizes}
        self.fill()
        self.router = pod.route()

    def fill(self) -> None:
        """Starts others for hosts that were killed."""
        for role, size in self._sizes.items():
            while len(self.hosts[role]) < size:
                self.hosts[role].append(self._pod.host(role))

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.hosts[role].pop(0).pid, number)

    def kill_router(self) -> None:
        os.kill(self.router.pid, signal.SIGKILL)

    def restart_router(self) -> None:
        self.router = self._pod.route()

    async def until_all_joined(self) -> None:
        await until_hosts(self.router.base_url, len(self.urls))

    @property
    def urls(self) -> list[str]:
        return [host.base_url for hosts in self.hosts.values() for host in hosts]


class Standing(NamedTuple):
    """The addresses of a pod that tests share as long as they harm nobody."""

    prefill: str
    decode: str
    router: str


@contextmanager
def standing_pod(directory: Path) -> Iterator[Standing]:
    with ExitStack() as stack:
        pod = PodProcesses(directory, stack)
        urls = [pod.host(role).base_url for role in ("prefill", "decode")]
        router = pod.route().base_url
        asyncio.run(until_hosts(router, 2))
        yield Standing(*urls, router)


async def load_of(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession(url) as session, session.get("/v1/load") as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def until_hosts(url: str, count: int) -> None:
    while sum(r["state"] == "ready" for r in (await load_of(url))["replicas"]) != count:
        await asyncio.sleep(0.05)


def is_free(load: dict[str, Any]) -> bool:
    """Returns True if nothing runs, waits or is held, and every block is free."""
    names = ("num_running", "num_waiting", "num_awaiting_kv", "num_leases", "num_leased_blocks")
    return not any(load[name] for name in names) and load["num_free_blocks"] == load["num_blocks"]


async def until_free(urls: Sequence[str], limit_s: float = 60.0) -> None:
    """Waits until no host holds anything. Raises TimeoutError if that takes far longer than a lease."""
    async with asyncio.timeout(limit_s):
        for url in urls:
            while not is_free(await load_of(url)):
                await asyncio.sleep(0.05)


# ---- a proxy as others write it


async def ask_prefill(
    session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]
) -> dict[str, Any]:
    """The answer of the prefill server, as vLLM's proxies ask it."""
    nothing = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    params = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(nothing)}
    body = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": params}
    body.pop("stream_options", None)
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    async with session.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def ask_decode(
    session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]
) -> Any:
    """The answer, or the events of its stream."""
    async with session.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            return await response.json()
        assert response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def ask_both(
    session: aiohttp.ClientSession, prefill: str, decode: str, path: str, body: dict[str, Any]
) -> Any:
    """What a client gets through the proxy."""
    answer = await ask_prefill(session, prefill, path, body)
    params = answer["kv_transfer_params"]
    return await ask_decode(session, decode, path, {**body, "kv_transfer_params": params})
