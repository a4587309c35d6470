# SPDX-License-Identifier: Apache-2.0
"""A router, or an etcd that routers look into, dies under load."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp

from benchmarks.chaos.servers import Server, Stream, read_stream, server
from benchmarks.chaos.trial import Outcome, Trial

_HOST = ["--log-level", "error"]
_STREAMS = 16
_PAUSE_S = 5.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_hosts(routers: Sequence[Server], count: int) -> None:
    async with aiohttp.ClientSession() as session:
        for router in routers:
            found = 0
            while found < count:
                async with session.get(f"{router.url}/v1/hosts") as answer:
                    hosts = (await answer.json())["data"]
                    found = sum(host["state"] == "ready" for host in hosts)
                await asyncio.sleep(0.05)


async def read_streams(url: str, num_tokens: int, streams: Sequence[Stream]) -> None:
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(
            *(
                read_stream(session, url, stream, prompt=f"Story {number}", max_tokens=num_tokens)
                for number, stream in enumerate(streams)
            )
        )


async def until_running(streams: Sequence[Stream]) -> None:
    while any(stream.num_events < 3 and not stream.error for stream in streams):
        await asyncio.sleep(0.01)


async def _kill_router(
    victim: Server, other: Server, num_tokens: int
) -> tuple[list[Stream], list[Stream]]:
    """Streams of the router that lives on, from before and from after the death of the other one."""
    lost, during = ([Stream() for _ in range(_STREAMS)] for _ in range(2))
    tasks = [
        asyncio.ensure_future(read_streams(victim.url, num_tokens, lost)),
        asyncio.ensure_future(read_streams(other.url, num_tokens, during)),
    ]
    await until_running([*lost, *during])
    victim.process.kill()
    await asyncio.gather(*tasks)
    after = [Stream() for _ in range(_STREAMS)]
    await read_streams(other.url, num_tokens, after)
    return during, after


def _run_router(short: bool) -> Outcome:
    with _cluster() as (key, _), contextlib.ExitStack() as stack:
        ports = [free_port(), free_port()]
        joins = [f"127.0.0.1:{port}" for port in ports]
        hosts_flags = [*_HOST, *key, "--join", ",".join(joins)]
        # A router is ready with its first host, and a host looks for its routers until they are there.
        hosts = 1 if short else 2
        for _ in range(hosts):
            stack.enter_context(server(hosts_flags))
        routers = [
            stack.enter_context(
                server([*key, "--join-listen", join, "--log-level", "error"], "route")
            )
            for join in joins
        ]
        asyncio.run(_until_hosts(routers, hosts))
        during, after = asyncio.run(_kill_router(routers[0], routers[1], 50 if short else 200))
    return outcome_of("of the other router's", [*during, *after], None if short else _PAUSE_S)


def _run_etcd(short: bool) -> Outcome:
    if shutil.which("etcd") is None:
        return Outcome("etcd is not installed here", False)
    with _cluster() as (key, directory), contextlib.ExitStack() as stack:
        port = free_port()
        etcd = _Etcd(directory / "etcd", port)
        stack.callback(etcd.kill)
        etcd.start()
        place = f"etcd://127.0.0.1:{port}/pagoda"
        hosts = 1 if short else 2
        for _ in range(hosts):
            stack.enter_context(server([*_HOST, *key, "--join", place]))
        flags = [*key, "--discovery", place, "--log-level", "error"]
        router = stack.enter_context(server(flags, "route"))
        asyncio.run(_until_hosts([router], hosts))
        streams = asyncio.run(
            _lose_etcd(router, etcd, 50 if short else 400, away_s=0.5 if short else 15.0)
        )
        asyncio.run(_until_hosts([router], hosts))
    return outcome_of("before, while it is away, and after", streams, None if short else _PAUSE_S)


async def _lose_etcd(router: Server, etcd: _Etcd, num_tokens: int, away_s: float) -> list[Stream]:
    before, during, after = ([Stream() for _ in range(_STREAMS)] for _ in range(3))
    first = asyncio.ensure_future(read_streams(router.url, num_tokens, before))
    await until_running(before)
    etcd.kill()
    second = asyncio.ensure_future(read_streams(router.url, num_tokens, during))
    await asyncio.sleep(away_s)
    await asyncio.to_thread(etcd.start)
    await asyncio.gather(first, second)
    await read_streams(router.url, num_tokens, after)
    return [*before, *during, *after]


class _Etcd:
    """An etcd that keeps its data from one start to the next."""

    def __init__(self, directory: Path, port: int) -> None:
        peers = f"http://127.0.0.1:{free_port()}"
        clients = f"http://127.0.0.1:{port}"
        self._port = port
        self._command = ["etcd", "--data-dir", str(directory), "--log-level", "error"]
        self._command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        self._command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        self._command += ["--initial-cluster", f"default={peers}"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[list[str], Path]]:
    """Flags with the key of a cluster, and a directory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        key = Path(directory) / "cluster.key"
        key.write_text("0123456789abcdef" * 4, encoding="utf-8")
        key.chmod(0o600)
        yield ["--cluster-key-file", str(key)], Path(directory)


def outcome_of(which: str, streams: Sequence[Stream], limit_s: float | None) -> Outcome:
    """All streams must be complete; `limit_s` is the longest pause that may be, None for any."""
    complete = sum(stream.is_complete for stream in streams)
    pause_s = max(stream.longest_pause_s for stream in streams)
    measured = (
        f"{complete} of {len(streams)} streams {which} complete; longest pause {pause_s:.2f} s"
    )
    return Outcome(measured, complete == len(streams) and (limit_s is None or pause_s <= limit_s))


ROUTER = Trial(
    "router",
    f"SIGKILL of one of two routers of the same hosts, while {_STREAMS} streams come from each",
    f"streams of the other router and new ones complete, no pause beyond {_PAUSE_S:g} s",
    _run_router,
    limit_s=1800.0,
)
ETCD = Trial(
    "etcd",
    "SIGKILL of the etcd in which a router looks for its hosts, under load; it comes back after 15 s",
    f"all streams complete, no pause beyond {_PAUSE_S:g} s, and the hosts are there again",
    _run_etcd,
    limit_s=1800.0,
)
