# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.role_changes`: how long streams stand still while the roles of their hosts change.

Three hosts of the embedded model, of one thread each, behind a router answer streams without a pause. One time
nothing happens; one time a host gets another role twice a second, in the order of a table.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random

import aiohttp

from pagoda.cli.server_process import server_process

NUM_STREAMS, PROMPT_LEN, OUTPUT_LEN = 12, 256, 96
SECONDS, CHANGE_S = 20.0, 0.5
CHANGES = [
    (0, "decode"),
    (1, "prefill"),
    (2, "both"),
    (0, "standby"),
    (0, "prefill"),
    (1, "decode"),
    (2, "decode"),
]
"""Hosts and the roles that they get, again and again; the first is a prefill host, the others decode hosts."""


class Streams:
    """Streams that follow each other, and the pauses in them."""

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self.first_s: list[float] = []
        self.num_whole = self.num_broken = 0

    async def keep_asking(self, session: aiohttp.ClientSession, seed: int, until: float) -> None:
        draw = Random(seed)
        while time.perf_counter() < until:
            body = {
                "prompt": [draw.randrange(10, 500) for _ in range(PROMPT_LEN)],
                "max_tokens": OUTPUT_LEN,
                "ignore_eos": True,
                "stream": True,
            }
            num_events, is_whole, last = 0, False, time.perf_counter()
            async with session.post("/v1/completions", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        (self.gaps_s if num_events else self.first_s).append(now - last)
                        num_events, last = num_events + 1, now
                    is_whole |= line.startswith(b"data: [DONE]")
            self.num_whole += is_whole
            self.num_broken += not is_whole


async def _change_roles(session: aiohttp.ClientSession, ids: list[str], until: float) -> None:
    for host, role in itertools.cycle(CHANGES):
        await asyncio.sleep(CHANGE_S)
        if time.perf_counter() > until:
            return
        path = f"/v1/hosts/{ids[host]}"
        async with session.patch(path, json={"role": role}) as answer:
            answer.raise_for_status()


async def _measure(url: str, ids: list[str], *, changes: bool) -> Streams:
    streams, until = Streams(), time.perf_counter() + SECONDS
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(url, connector=connector) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for seed in range(NUM_STREAMS):
            tasks.create_task(streams.keep_asking(session, seed, until))
        if changes:
            tasks.create_task(_change_roles(session, ids, until))
    return streams


async def _hosts(url: str) -> list[str]:
    """The ids of three hosts that have joined, the prefill host first."""
    async with aiohttp.ClientSession(url) as session:
        while True:
            async with session.get("/v1/hosts") as answer:
                hosts = (await answer.json())["data"]
            if sum(host["state"] == "ready" for host in hosts) == 3:
                return [h["id"] for h in sorted(hosts, key=lambda host: host["role"] != "prefill")]
            await asyncio.sleep(0.1)


def main() -> int:
    """Prints a table of pauses; 1 if a stream broke off."""
    num_broken = 0
    with ExitStack() as stack:
        key = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "key"
        key.write_text(secrets.token_hex())
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            joins = f"127.0.0.1:{free.getsockname()[1]}"
        common = ["--cluster-key-file", str(key), "--log-level", "warning"]
        for role in ("prefill", "decode", "decode"):
            flags = ["--threads", "1", "--role", role, "--role-changes", "--join", joins, *common]
            stack.enter_context(server_process(flags))
        router = stack.enter_context(server_process(["--join-listen", joins, *common], "route"))
        ids = asyncio.run(_hosts(router.base_url))
        print("| roles | whole | broken off | TTFT max s | between tokens p99 s | max s |")
        print("|---|---|---|---|---|---|")
        for changes in (False, True):
            streams = asyncio.run(_measure(router.base_url, ids, changes=changes))
            gaps = sorted(streams.gaps_s)
            print(
                f"| {'change' if changes else 'stay'} | {streams.num_whole} | {streams.num_broken} "
                f"| {max(streams.first_s):.2f} | {gaps[len(gaps) * 99 // 100]:.3f} | {gaps[-1]:.2f} |",
                flush=True,
            )
            num_broken += streams.num_broken
    return 1 if num_broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
