# SPDX-License-Identifier: Apache-2.0
"""CPU time of servers that have nothing to do while somebody watches them."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from benchmarks.chaos.trial import Outcome, Trial
from benchmarks.handoff.pod import free_address, write_key
from benchmarks.idle import cpu_share
from benchmarks.start_up import ask_once
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.concurrency.event_loop import run
from pagoda.plugins.page.live_stats import WINDOW_S

_LARGEST_SHARE = 0.003
_SCRAPE_S = 15.0
"""Seconds between two scrapes of Prometheus, whose default is a minute."""


@contextmanager
def _watched(url: str) -> Iterator[None]:
    """The live page is open, which reads events and nothing else, and Prometheus scrapes."""
    ending = threading.Event()

    async def read_events(session: aiohttp.ClientSession) -> None:
        async with session.get("/v1/live") as answer:
            answer.raise_for_status()
            async for _ in answer.content:
                seen.add("the live page")

    async def scrape(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get("/metrics") as answer:
                answer.raise_for_status()
                await answer.read()
            seen.add("a scrape")
            await asyncio.sleep(_SCRAPE_S)

    async def watch() -> None:
        timeout = aiohttp.ClientTimeout(None)
        async with aiohttp.ClientSession(url, timeout=timeout) as session:
            tasks = [
                asyncio.create_task(read_events(session)),
                asyncio.create_task(scrape(session)),
            ]
            await asyncio.to_thread(ending.wait)
            unwatched.extend(task for task in tasks if task.done())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    unwatched: list[asyncio.Task[None]] = []
    seen: set[str] = set()
    thread = threading.Thread(target=run, args=(watch(),), name="watcher")
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
    if len(seen) < 2:
        raise RuntimeError(f"The server was watched by {' and '.join(seen) or 'nobody'} alone.")
    if unwatched:
        raise RuntimeError(f"The server was not watched to the end: {unwatched[0]}")


def _tiers(directory: Path) -> list[str]:
    disk = ["--kv-disk-path", str(directory / "kv"), "--kv-disk-bytes", "1GiB"]
    return ["--kv-host-bytes", "64MiB", *disk]


def _share(watched: ServerProcess, others: Sequence[ServerProcess], short: bool) -> float:
    """CPU seconds per second of all processes of these servers while one of them is watched, from when its page
    has nothing left to show of a request."""
    settling_s, seconds = (0.0, 1.0) if short else (WINDOW_S, 60.0)
    asyncio.run(ask_once(watched))
    with _watched(watched.base_url):
        time.sleep(settling_s)
        # One server after the other: all have nothing to do all the time.
        return sum(cpu_share(server.pid, seconds) for server in (watched, *others))


def _run(short: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        tiers, key = _tiers(Path(directory)), write_key(Path(directory))
        with server_process(tiers) as server:
            alone = _share(server, (), short)
        join = free_address()
        with (
            server_process(
                ["--dp", "2", "--join", join, "--cluster-key-file", str(key), *tiers]
            ) as host,
            server_process(
                ["--join-listen", join, "--cluster-key-file", str(key)], "route"
            ) as router,
        ):
            fleet = _share(router, (host,), short)
    words = (
        f"{100 * alone:.2f} % of a core, all processes of a server; "
        f"{100 * fleet:.2f} % with a router and a host of two engines instead"
    )
    # Processor time is no matter of the short form, which also runs on busy machines.
    return Outcome(words, short or max(alone, fleet) <= _LARGEST_SHARE)


IDLE = Trial(
    "idle",
    "nothing after one request; KV tiers in host memory and on disk, the live page open, a scrape every 15 s",
    "all processes together use at most 0.3 % of a core, of a server, and of a router with a host of two engines",
    _run,
)
