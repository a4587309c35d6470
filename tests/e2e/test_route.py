# SPDX-License-Identifier: Apache-2.0
"""`pagoda route` over hosts that join it: real processes, ended and killed in the middle of streams."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from constrained import check_answers, constrained_bodies
from pod_processes import Crowd, PodProcesses
from streams import bodies, stream_all, until_more

NUM_STREAMS = 48
REQUESTS = bodies(NUM_STREAMS, 60)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    with ExitStack() as stack:
        yield Crowd(PodProcesses(tmp_path_factory.mktemp("crowd"), stack), {"none": 2})


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_host_ends_under_many_streams(
    crowd: Crowd, number: signal.Signals, constrained: bool, plain_url: str
) -> None:
    """A host that is killed leaves its streams to the other one; a host that is asked to end finishes them."""
    crowd.fill()
    requests = constrained_bodies() if constrained else REQUESTS

    async def ask() -> None:
        await crowd.until_all_joined()
        expected = await stream_all(plain_url, requests)
        if constrained:
            check_answers(expected)

        async def end(received: Callable[[], int]) -> None:
            await until_more(received, 10 * len(requests))
            crowd.kill("none", number)
            await until_more(received, 1)

        assert await stream_all(crowd.router.base_url, requests, end) == expected
        await crowd.until_all_joined()
        assert await stream_all(crowd.router.base_url, requests[:6]) == expected[:6]

    asyncio.run(ask())


def test_hosts_find_a_router_that_was_started_again(crowd: Crowd, plain_url: str) -> None:
    crowd.fill()
    crowd.kill_router()
    crowd.restart_router()
    expected = asyncio.run(stream_all(plain_url, REQUESTS[:8]))
    assert asyncio.run(stream_all(crowd.router.base_url, REQUESTS[:8])) == expected
