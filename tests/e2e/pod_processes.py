# SPDX-License-Identifier: Apache-2.0
"""Hosts with roles and a router as processes, and requests for them."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from streams import bodies

from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.ipc.addresses import bracketed, family

HOST = ["--dtype", "float32", "--threads", "1", "--num-kv-blocks", "2048", "--block-size", "16"]
LEASE_S = 5
QUIET = ["--log-level", "warning"]


class PodProcesses:
    """Starts hosts that join one address, and routers that listen there; all of them end with `stack`."""

    def __init__(self, directory: Path, stack: ExitStack, address: str = "127.0.0.1") -> None:
        self._stack = stack
        self._key = directory / "key"
        self._key.write_text(secrets.token_hex())
        with socket.socket(family(address)) as free:
            free.bind((address, 0))
            self._join = f"{bracketed(address)}:{free.getsockname()[1]}"

    def host(self, role: str, *flags: str, advertise: str | None = None) -> ServerProcess:
        lease = [] if role == "none" else ["--role", role, "--kv-lease", str(LEASE_S)]
        join = ["--join", self._join, "--cluster-key-file", str(self._key)]
        own = [*lease, *([] if advertise is None else ["--advertise", advertise]), *flags]
        return self._stack.enter_context(server_process([*HOST, *join, *QUIET, *own]))

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


async def load_of(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession(url) as session, session.get("/v1/load") as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def until_hosts(url: str, count: int) -> None:
    while sum(r["state"] == "ready" for r in (await load_of(url))["replicas"]) != count:
        await asyncio.sleep(0.05)


async def until_ready(url: str) -> None:
    """Waits until a host computes: its state is `ready` while its worker starts again."""
    async with aiohttp.ClientSession(url) as session:
        while True:
            async with session.get("/health/ready") as response:
                if response.status == 200:
                    return
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


def long_bodies(count: int, max_tokens: int, **fields: Any) -> list[dict[str, Any]]:
    """Streams of answers to questions of some hundred tokens."""
    return [{**body, **fields} for body in bodies(count, max_tokens, skill="recall_40")]


async def fetched(url: str) -> int:
    """Blocks that came from other hosts, so far."""
    return int((await load_of(url))["tiers"][-1]["num_loaded"])
