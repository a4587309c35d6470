# SPDX-License-Identifier: Apache-2.0
"""The head of a Ray cluster dies under load, with the workers on its node, and comes back."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence

from benchmarks.chaos.routers import free_port, outcome_of, read_streams, until_running
from benchmarks.chaos.servers import Server, Stream, server
from benchmarks.chaos.trial import Outcome, Trial
from benchmarks.ray_nodes import QUICK_TO_NOTICE, RayCluster, ray_cluster

_HOST = "127.0.0.1"
_STREAMS = 16
_AWAY_S = 5.0
_PAUSE_S = 30.0


def _run(short: bool) -> Outcome:
    if importlib.util.find_spec("ray") is None:
        return Outcome("Ray is not installed here", False)
    with ray_cluster(_HOST, free_port(), QUICK_TO_NOTICE) as cluster:
        flags = ["--executor", "ray", "--ray-address", cluster.address, "--log-level", "error"]
        with server(flags) as one:
            streams = asyncio.run(_lose_head(one, cluster, short))
    return outcome_of("before, while it is away, and after", streams, None if short else _PAUSE_S)


async def _lose_head(one: Server, cluster: RayCluster, short: bool) -> Sequence[Stream]:
    before, during, after = ([Stream() for _ in range(_STREAMS)] for _ in range(3))
    num_tokens = 200 if short else 1500
    first = asyncio.ensure_future(read_streams(one.url, num_tokens, before))
    await until_running(before)
    await asyncio.to_thread(cluster.kill_head)
    second = asyncio.ensure_future(read_streams(one.url, num_tokens, during))
    await asyncio.sleep(0.0 if short else _AWAY_S)
    await asyncio.to_thread(cluster.restart_head)
    await asyncio.gather(first, second)
    await read_streams(one.url, num_tokens, after)
    return [*before, *during, *after]


RAY_HEAD = Trial(
    "ray-head",
    f"SIGKILL of the head of a Ray cluster and of the worker on its node, while {_STREAMS} streams"
    f" come and as many more are asked; a head at the same address starts {_AWAY_S:g} s later",
    f"all streams complete, no pause beyond {_PAUSE_S:g} s, most of which Ray's own start takes",
    _run,
    limit_s=900.0,
)
