# SPDX-License-Identifier: Apache-2.0
"""How long ranks over gloo wait: not long for a connection, for ever in a step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event

import pytest
import torch

from pagoda.parallel import distributed
from pagoda.parallel.distributed import DistributedCollectives, GroupStore

HOST = "127.0.0.1"
CONNECT_TIMEOUT_S = 1


@pytest.fixture(autouse=True)
def _connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_CONNECT_TIMEOUT", timedelta(seconds=CONNECT_TIMEOUT_S))


def _join(address: str, rank: int) -> DistributedCollectives:
    return DistributedCollectives(address, rank, 2, HOST)


def test_a_rank_that_nobody_joins_says_where_it_waited() -> None:
    store = GroupStore(HOST)
    with pytest.raises(ConnectionError, match=rf"that meet at {store.address}; their hosts must"):
        _join(store.address, 1)


def test_a_store_that_does_not_answer() -> None:
    with pytest.raises(ConnectionError, match=f"that meet at {HOST}:1;"):
        _join(f"{HOST}:1", 1)


def test_a_step_waits_longer_than_a_connection_may_take() -> None:
    store = GroupStore(HOST)
    waits = Event()

    def late(rank: int) -> list[float]:
        group = _join(store.address, rank)
        if rank == 0:
            waits.set()
        else:
            waits.wait()
            until = time.monotonic() + 1.5 * CONNECT_TIMEOUT_S
            while time.monotonic() < until:
                time.sleep(0.05)
        large = torch.ones(2**15)
        assert group.host == HOST
        return [
            *group.all_reduce(torch.ones(1)).tolist(),
            *group.all_reduce(large)[:1].tolist(),
            float(group.broadcast(None if rank else b"3")),
        ]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(late, range(2))) == [[2.0, 2.0, 3.0]] * 2
