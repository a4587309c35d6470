# SPDX-License-Identifier: Apache-2.0
"""The second connection of a worker: transfers come, ends go, and it sleeps between them."""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_server, new_keys, start_authenticator
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    KVPeer,
    RemoteBlocks,
    TierBlocks,
    Transfer,
    TransferEnd,
    TransferLink,
    TransferMessage,
    Transfers,
)
from pagoda.messages.worker_config import CurveKeys, WorkerConfig
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.transfer_link import TransferSpans, TransferThread

PARALLEL = ParallelConfig(tensor_parallel_size=2)
FIRST, SECOND = (Transfer(n, 3, DeviceBlocks([n]), HostSlots([n])) for n in (7, 8))


class Half:
    """Ends what it is told to end."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self.told: queue.SimpleQueue[Transfers] = queue.SimpleQueue()
        self.is_closed = False

    owes_blocks = False

    def apply(self, message: Transfers) -> None:
        self.told.put(message)

    def give_up(self) -> None: ...

    def end(self, *ids: int) -> None:
        for transfer_id in ids:
            self._jobs.begin(Transfer(transfer_id, 3, DeviceBlocks([]), HostSlots([])), 0)

    def close(self) -> None:
        self.is_closed = True


class Engine:
    """The socket that a worker's link connects to."""

    def __init__(self, address: str, keys: CurveKeys | None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        if keys is not None:
            start_authenticator(self.context, keys)
            encrypt_server(self.socket, keys)
        self.socket.bind(address)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._decode = Codec[TransferMessage](TransferMessage).decode

    def receive(self) -> TransferMessage:
        identity, payload = self.socket.recv_multipart()
        assert identity == b"kv-1"
        return self._decode(payload)

    def send(self, message: Transfers) -> None:
        self.socket.send_multipart([b"kv-1", msgspec.msgpack.encode(message)])


@pytest.fixture(params=["plain", "encrypted"])
def keys(request: pytest.FixtureRequest) -> CurveKeys | None:
    return new_keys() if request.param == "encrypted" else None


@pytest.fixture
def engine(keys: CurveKeys | None) -> Iterator[Engine]:
    engine = Engine("tcp://127.0.0.1:*", keys)
    yield engine
    engine.context.destroy(linger=0)


@pytest.fixture
def link(engine: Engine, keys: CurveKeys | None) -> Iterator[TransferThread]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    config = WorkerConfig(model="m", parallel=PARALLEL, place=RankPlace(tp=1), curve=keys)
    spans = TransferSpans(Tracer("worker"), 1, (1,))
    link = TransferThread(context, engine.address, config, Half, spans)
    yield link
    link.close()
    context.term()  # no socket of the thread is left


def half(link: TransferThread) -> Half:
    assert isinstance(link.transfers, Half)
    return link.transfers


def test_transfers_and_peers_come_in_order_and_ends_go_in_any(
    engine: Engine, link: TransferThread
) -> None:
    assert engine.receive() == TransferLink(), "it says first that it is there"
    said = [Transfers([FIRST], [KVPeer(peer_id="p", ranks=())], ["q"]), Transfers([SECOND])]
    for message in said:
        engine.send(message)
    assert [half(link).told.get(timeout=20) for _ in said] == said
    half(link).end(8)
    assert engine.receive() == TransferEnd(8, 3)
    half(link).end(7, 2, 3)
    assert [engine.receive() for _ in range(3)] == [TransferEnd(n, 3) for n in (7, 2, 3)]


@pytest.mark.parametrize("again", [SECOND, FIRST])
def test_a_transfer_out_of_turn_ends_the_worker(
    engine: Engine, link: TransferThread, monkeypatch: pytest.MonkeyPatch, again: Transfer
) -> None:
    """It would write to blocks that may belong to others by now."""
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr("os._exit", ends.put)
    engine.receive()
    for transfer in (SECOND, again):
        engine.send(Transfers([transfer]))
    assert ends.get(timeout=20) == 1
    assert half(link).told.get(timeout=20) == Transfers([SECOND])
    assert half(link).told.empty()


def test_closing_it_closes_the_workers_half(engine: Engine, link: TransferThread) -> None:
    engine.receive()
    link.close()
    assert half(link).is_closed
    assert "kv-link" not in [thread.name for thread in threading.enumerate()]


# ---- spans of traces

STORE = Transfer(1, 0, DeviceBlocks([4, 5]), HostSlots([0, 1]))
LOAD = Transfer(2, 0, TierBlocks("disk", [b"key"]), DeviceBlocks([6]))
FETCH = Transfer(3, 0, RemoteBlocks("peer", [9]), DeviceBlocks([7]))


class _Trace:
    def __init__(self, directory: Path) -> None:
        ticks = itertools.count(1000, 1000)
        self._directory = directory
        self.tracer = Tracer("worker", clock_ns=lambda: next(ticks))
        self.spans = TransferSpans(self.tracer, 100, (60, 40))

    def start(self) -> None:
        session = TraceSession(level=TraceLevel.E2E, directory=str(self._directory), run="run")
        self.tracer.start(session)

    def events(self) -> list[dict[str, Any]]:
        self.tracer.stop()
        (fragment,) = self._directory.iterdir()
        return [json.loads(line) for line in fragment.read_bytes().splitlines()]


def test_each_transfer_is_a_span(tmp_path: Path) -> None:
    trace = _Trace(tmp_path)
    trace.start()
    trace.spans.begin([STORE, LOAD])
    trace.spans.end(TransferEnd(1, 0))
    trace.spans.begin([FETCH])
    trace.spans.end(TransferEnd(3, 0, [0], "it is gone"))
    trace.spans.end(TransferEnd(2, 0))
    events = trace.events()
    rows = [e["tid"] for e in events if e.get("ph") == "M" and e["args"]["name"] == "kv transfers"]
    assert len(rows) == 2
    spans = [e for e in events if e.get("ph") == "X"]
    assert [(span["tid"], span["args"]) for span in spans] == [
        (rows[0], {"blocks": 2, "source": "device", "target": "host", "bytes": 200}),
        (rows[0], {"blocks": 1, "source": "remote", "target": "device", "bytes": 60, "failed": 1}),
        (rows[1], {"blocks": 1, "source": "disk", "target": "device", "bytes": 100}),
    ]
    first, second, beside = ((span["ts"], span["ts"] + span["dur"]) for span in spans)
    assert first[1] < second[0]  # in a row that was free again
    assert beside[0] == first[0]
    assert beside[1] > second[1]


def test_transfers_that_began_before_are_left_out(tmp_path: Path) -> None:
    trace = _Trace(tmp_path)
    trace.spans.begin([STORE])
    trace.start()
    trace.spans.end(TransferEnd(1, 0))
    assert [e for e in trace.events() if e.get("ph") == "X"] == []
