# SPDX-License-Identifier: Apache-2.0
"""Hosts with made-up tokens in this process, which routers in processes of their own reach over real sockets."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from pagoda.checkpoints.fingerprint import model_digest
from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.fleet import EngineMembers, Fleet
from pagoda.fleet.policies import POLICIES
from pagoda.ipc.addresses import Advertised
from pagoda.ipc.curve import read_cluster_key
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import PoolModel
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.router.discovery.choice import registering
from pagoda.plugins.router.door import JoinConfig
from pagoda.plugins.sim.model import sim_token
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.telemetry.request_tracker import RequestTracker

VOCAB_SIZE = 512
NUM_BLOCKS = 512
PROMPT = [1, 2, 3]


def write_key(directory: Path) -> Path:
    key = directory / "key"
    key.write_text(secrets.token_hex())
    return key


def join_config(
    join: str,
    key_file: Path,
    tracker: RequestTracker | None = None,
    *,
    name: str = "",
    pool: str = "",
) -> JoinConfig:
    files, keys = resolve_model(None), read_cluster_key(key_file)
    return JoinConfig(
        register=registering(join, keys),
        keys=keys,
        advertised=Advertised("127.0.0.1", None),
        models=[PoolModel(pool, name or files.served_name, model_digest(files))],
        tracker=tracker,
    )


async def start_host(
    join: str,
    key_file: Path,
    *,
    step_s: float = 0.005,
    name: str = "",
    pool: str = "",
    vocab_size: int = VOCAB_SIZE,
) -> Fleet:
    """A host with a simulated engine, which is made known where `join` says."""
    config = EngineConfig(
        worker=WorkerConfig(model="sim"),
        executor="sim",
        sim=SimConfig(
            base_s=step_s, vocab_size=vocab_size, max_model_len=4096, num_blocks=NUM_BLOCKS
        ),
        max_num_seqs=64,
    )
    host = Fleet(
        EngineMembers(Dispatcher([SimEngine(config).replica], POLICIES["round-robin"])),
        entrance=join_config(join, key_file, name=name, pool=pool).entrance,
    )
    await host.start()
    return host


@asynccontextmanager
async def sim_hosts(
    joins: Sequence[str], key_file: Path, *, step_s: float = 0.005
) -> AsyncIterator[list[Fleet]]:
    """A host for each of `joins`."""
    async with AsyncExitStack() as stack:
        hosts = []
        for join in joins:
            hosts.append(await start_host(join, key_file, step_s=step_s))
            stack.push_async_callback(hosts[-1].close)
        yield hosts


def expected(seed: int, max_tokens: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The answer of any such host to `PROMPT`."""
    tokens = [PROMPT[-1]]
    for position in range(max_tokens):
        tokens.append(sim_token(seed, position, tokens[-1], vocab_size))
    return tokens[1:]


async def ask(
    session: aiohttp.ClientSession, base_url: str, seed: int, max_tokens: int
) -> list[int]:
    body = {
        "prompt": PROMPT,
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with session.post(f"{base_url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return list(answer["choices"][0]["token_ids"])


async def host_ids(session: aiohttp.ClientSession, base_url: str) -> set[str]:
    """The hosts that a router uses."""
    async with session.get(f"{base_url}/v1/hosts") as response:
        hosts = (await response.json())["data"]
    return {host["id"] for host in hosts if host["state"] == "ready"}


async def until_hosts(session: aiohttp.ClientSession, base_urls: Sequence[str], count: int) -> None:
    """Waits until all routers use the same hosts, so many."""
    while True:
        views = [await host_ids(session, url) for url in base_urls]
        if len(views[0]) == count and all(view == views[0] for view in views):
            return
        await asyncio.sleep(0.05)


@asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[ServerProcess]:
    """A router that has found a host. This event loop goes on while it starts and ends."""
    process = server_process(flags, "route")
    server = await asyncio.to_thread(process.__enter__)
    try:
        yield server
    finally:
        await asyncio.to_thread(process.__exit__, None, None, None)
