"""Operations of both sides of a handoff in proportion to the requests of a burst."""

from __future__ import annotations

from collections.abc import Callable

from operations import assert_linear
from pair import LEASE_S, NO_KEYS, READY, make_exporter
from test_connector import KEYS

from benchmarks.simulation.network import SimNetwork
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.frontend import KVSource
from pagoda.pd.connector import RemoteKV
from pagoda.pd.messages import KVRelease, KVSubscribe
from pagoda.pd.transfer_tokens import TransferTokens

SIZES = (512, 1024, 4096)


def exports(count: int) -> Callable[[], None]:
    """A burst of prompts: half are fetched and released, half make room one after the other or expire."""
    exporter, listener, pool, clock = make_exporter(count)
    exporter.workers_ready(READY)
    blocks = pool.allocate(count)

    def live() -> None:
        sources = [exporter.open(str(number), 1) for number in range(count)]
        for source, block in zip(sources, blocks, strict=True):
            exporter.hold(source.transfer_id, [block], [b"key"])
        for source in sources[: count // 2]:
            listener.inbox.put((b"asker", KVSubscribe(source.transfer_id, 0, 1)), 0.0)
        exporter.step()
        for source in sources:
            exporter.finish(source.transfer_id, b"key", 1)
        for _ in range(count // 4):
            assert exporter.make_room()
            assert exporter.num_wanted == count // 2
        for source in sources[: count // 2]:
            listener.inbox.put((b"asker", KVRelease([source.transfer_id])), 0.0)
            exporter.step()
        clock.advance_to(clock.now() + LEASE_S + 1)
        exporter.step()
        assert not exporter.leases

    return live


def fetches(count: int) -> Callable[[], None]:
    """A burst of requests for KV of many engines, of which none answers."""
    clock, pool = VirtualClock(), BlockPool(64)
    tokens = TransferTokens(NO_KEYS)
    network = SimNetwork(clock)
    for number in range(count // 16):
        network.listener(f"tcp://p{number}:1")
    remote = RemoteKV(network.peers(), TransferLedger(pool), clock, tokens=tokens, engine_id="own")
    remote.workers_ready(READY)
    requests = []
    for number in range(count):
        address = f"tcp://p{number % (count // 16)}:1"
        source = KVSource(address=address, engine_id="e", transfer_id=tokens.new_id(address, "e"))
        requests.append(PrefixRequest(str(number), KEYS, list(range(32)), source))

    def live() -> None:
        for request in requests:
            remote.on_queued(request, 0)
            remote.step()
            remote.next_event_at()
        for request in requests:
            remote.on_dequeued(request.request_id)
        remote.drain_events()

    return live


def test_exports() -> None:
    assert_linear(exports, SIZES)


def test_fetches() -> None:
    assert_linear(fetches, SIZES)
