# SPDX-License-Identifier: Apache-2.0
"""KV events and counters of servers with real workers, which are killed in between."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
from kv_subscriber import ClearedOnTheWire, StoredOnTheWire, Subscriber
from metrics_text import value
from ports import free_ports
from streams import bodies, children, stream_all
from tiers import ask_all, figures, flags, objects, some_questions

from pagoda.cli.server_process import server_process


async def counter(base_url: str, name: str) -> int:
    async with aiohttp.ClientSession(base_url) as session, session.get("/metrics") as response:
        return int(value(await response.text(), name, replica="0"))


async def num_cached(base_url: str) -> int:
    stored = await counter(base_url, "pagoda_kv_blocks_stored_total")
    return stored - await counter(base_url, "pagoda_kv_blocks_removed_total")


async def test_a_lost_worker_clears_all_that_was_cached() -> None:
    port = free_ports(2)[0]
    requests = bodies(4, max_tokens=40)
    subscriber = Subscriber(port, port + 1)
    try:
        with server_process(["--kv-events", f"tcp://127.0.0.1:{port}"]) as server:
            await stream_all(server.base_url, requests)
            await asyncio.to_thread(subscriber.replay)
            assert len(subscriber.view.keys) == await num_cached(server.base_url) > 4
            before, num_events = set(subscriber.view.keys), len(subscriber.events)

            (worker,) = children(server.pid, "pagoda.worker.main")
            os.kill(worker, signal.SIGKILL)
            await stream_all(server.base_url, requests[:1])
            await asyncio.to_thread(subscriber.replay)
            cleared, *rest = subscriber.events[num_events:]
            assert isinstance(cleared, ClearedOnTheWire)
            assert all(isinstance(event, StoredOnTheWire) for event in rest)
            assert 0 < len(subscriber.view.keys) == await num_cached(server.base_url)
            assert subscriber.view.keys < before
    finally:
        subscriber.close()


async def until_told(subscriber: Subscriber, directory: Path) -> None:
    """Waits until all that is on disk has been told of, which is when the last write has ended."""
    while subscriber.view.disk_keys != set(objects(directory)):
        await asyncio.sleep(0.01)
        await asyncio.to_thread(subscriber.replay)


async def test_events_name_the_tier_and_a_disk_outlives_the_worker(tmp_path: Path) -> None:
    port, directory = free_ports(2)[0], tmp_path / "kv"
    questions = some_questions(long=3, short=0)
    subscriber = Subscriber(port, port + 1)
    view = subscriber.view
    try:
        with server_process(flags(directory, kv_events=f"tcp://127.0.0.1:{port}")) as server:
            for _ in range(2):
                await ask_all(server.base_url, questions)
            await until_told(subscriber, directory)
            counts = await figures(server.base_url)
            assert len(view.host_keys) == counts["host", "stored"] - counts["host", "removed"] > 0
            assert len(view.disk_keys) == counts["disk", "stored"] > len(view.host_keys)
            assert len(view.keys) == await num_cached(server.base_url)
            num_events, on_disk = len(subscriber.events), set(view.disk_keys)

            (worker,) = children(server.pid, "pagoda.worker.main")
            os.kill(worker, signal.SIGKILL)
            await ask_all(server.base_url, questions[:1])
            await asyncio.to_thread(subscriber.replay)
            assert not any(
                isinstance(event, ClearedOnTheWire) for event in subscriber.events[num_events:]
            )
            assert on_disk <= view.disk_keys
            assert 0 < len(view.keys) == await num_cached(server.base_url)
    finally:
        subscriber.close()
