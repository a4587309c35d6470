# SPDX-License-Identifier: Apache-2.0
"""Events on real sockets: in order, replayed when lost, and never waited for."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from kv_subscriber import BatchOnTheWire, Subscriber
from ports import free_ports

from pagoda.errors import ConfigError
from pagoda.ipc import door
from pagoda.kv.events import BlockRemoved, BlockStored
from pagoda.plugins.kv_events import publisher as kv_events
from pagoda.plugins.kv_events.address import KVEventsAddress
from pagoda.plugins.kv_events.publisher import KVEventPublisher


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(number: int) -> BlockStored:
    return BlockStored([key(number)], None, [number] * 4, 4)


class Stage:
    """A publisher, its loop, and subscribers to it."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        """Context of the clients."""
        self.port = free_ports(2)[0]
        self.subscribers: list[Subscriber] = []
        self._start()

    def _start(self) -> None:
        self._engine_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        config = KVEventsAddress("127.0.0.1", self.port)
        self.publisher = KVEventPublisher(config, 0, 1, self._engine_context)

    def _stop(self) -> None:
        self.publisher.close()
        self._engine_context.term()  # only then are the ports free

    def restart(self) -> None:
        self._stop()
        self._start()

    def subscribe(self) -> Subscriber:
        subscriber = Subscriber(self.port, self.port + 1)
        self.subscribers.append(subscriber)
        return subscriber

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{self.port + 1}")
        return socket

    def publish(self, count: int) -> None:
        """Publishes a batch for each of the numbers below `count`."""
        for number in range(count):
            self.publisher.publish([stored(number)])

    def turn(self) -> None:
        """Work that the engine's loop does while it has nothing else to do."""
        if not self.publisher.is_replaying:
            self.publisher.replay_socket.poll(60_000)
        self.publisher.replay()
        while self.publisher.is_replaying:
            self.publisher.replay()

    def close(self) -> None:
        for subscriber in self.subscribers:
            subscriber.close()
        self._stop()
        self.context.destroy(linger=0)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


class Loop:
    """The engine's loop in a thread of its own: publishes what is put into `events`, answers replays."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self.events: queue.Queue[BlockStored] = queue.Queue()
        self._publisher = publisher
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Empty):
                self._publisher.publish([self.events.get(timeout=0.001)])
                self.events.task_done()
            self._publisher.replay()

    def publish_until(self, done: Callable[[float], bool], number: int) -> int:
        """Publishes blocks numbered from `number` on, one at a time; returns the first number left."""
        for _ in range(1200):
            self.events.put(stored(number))
            number += 1
            if done(0.05):
                return number
        raise AssertionError("nothing arrived")

    def take_rest(self, subscriber: Subscriber) -> None:
        """Returns when the subscriber has all that was given to be published."""
        self.events.join()
        subscriber.replay()


def replayed(socket: zmq.Socket[bytes]) -> list[tuple[int, bytes]]:
    """The batches of one replay, up to its end."""
    batches = []
    while True:
        assert socket.poll(60_000)
        *_, number, payload = socket.recv_multipart()
        if not payload:
            assert number == b"\xff" * 8
            return batches
        batches.append((int.from_bytes(number, "big"), payload))


def ask(stage: Stage, number: int) -> list[tuple[int, bytes]]:
    with stage.socket(zmq.DEALER) as client:
        client.send_multipart([b"", number.to_bytes(8, "big")])
        stage.turn()
        return replayed(client)


def test_an_event_is_a_map_in_an_array(stage: Stage) -> None:
    before = time.time()
    stage.publisher.publish([stored(1), BlockRemoved([key(7), key(8)])])
    (_, first), (_, second) = ask(stage, 0)
    assert msgspec.msgpack.decode(first)[1:] == [[{"type": "AllBlocksCleared"}], 0]
    ts, events, rank = msgspec.msgpack.decode(second)
    assert before <= ts <= time.time()
    assert rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [key(1)],
            "parent_block_hash": None,
            "token_ids": [1, 1, 1, 1],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "kv_cache_spec_sliding_window": None,
        },
        {
            "type": "BlockRemoved",
            "block_hashes": [key(7), key(8)],
            "medium": "GPU",
            "group_idx": 0,
        },
    ]


def test_a_replay_begins_where_it_is_asked_to(stage: Stage) -> None:
    stage.publish(200)
    everything = ask(stage, 0)
    numbers = [number for number, _ in everything]
    assert numbers == list(range(numbers[0], numbers[0] + 201))
    assert ask(stage, numbers[150]) == everything[150:]
    assert ask(stage, numbers[-1] + 1) == []
    assert ask(stage, 2**64 - 1) == []


def test_nothing_is_sent_for_a_step_without_events(stage: Stage) -> None:
    stage.publisher.publish([])
    assert len(ask(stage, 0)) == 1


def test_only_the_last_batches_are_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_KEPT_BATCHES", 5)
    stage.publish(20)
    batches = [msgspec.msgpack.decode(batch, type=BatchOnTheWire) for _, batch in ask(stage, 0)]
    assert [batch.events[0].token_ids[0] for batch in batches] == list(range(15, 20))
    size = len(ask(stage, 0)[0][1])
    monkeypatch.setattr(kv_events, "MAX_KEPT_BYTES", 3 * size)
    stage.publisher.publish([stored(20)])
    assert len(ask(stage, 0)) == 3


def test_a_req_socket_gets_the_first_batch_that_it_misses(stage: Stage) -> None:
    stage.publisher.publish([stored(1)])
    for _ in range(2):  # one socket could take the rest of its first answer for the second
        with stage.socket(zmq.REQ) as client:
            client.send(bytes(8))
            stage.turn()
            assert client.poll(60_000)
            _, payload = client.recv_multipart()
            assert b"AllBlocksCleared" in payload


def test_a_plain_dealer_needs_no_empty_frame(stage: Stage) -> None:
    with stage.socket(zmq.DEALER) as client:
        client.send(bytes(8))
        stage.turn()
        assert len(replayed(client)) == 1


@pytest.mark.parametrize("request_bytes", [b"", b"12345", b"123456789"])
def test_what_is_no_number_gets_an_empty_replay(stage: Stage, request_bytes: bytes) -> None:
    with stage.socket(zmq.DEALER) as client:
        client.send_multipart([b"", request_bytes])
        stage.turn()
        assert replayed(client) == []


def test_replays_go_out_in_parts_and_in_turn(stage: Stage) -> None:
    stage.publish(300)
    with stage.socket(zmq.DEALER) as first, stage.socket(zmq.DEALER) as second:
        for client in (first, second):
            client.send(bytes(8))
            assert stage.publisher.replay_socket.poll(60_000)
            stage.publisher.replay()
        stage.publisher.publish([stored(300)])  # steps go on meanwhile
        assert stage.publisher.is_replaying
        stage.turn()
        assert len(replayed(first)) == len(replayed(second)) == 302


def test_who_asks_again_begins_anew(stage: Stage) -> None:
    stage.publish(100)
    with stage.socket(zmq.DEALER) as client:
        client.send(bytes(8))
        assert stage.publisher.replay_socket.poll(60_000)
        stage.publisher.replay()
        client.send(b"\xff" * 8)
        assert stage.publisher.replay_socket.poll(60_000)
        stage.turn()
        assert not stage.publisher.is_replaying
        assert len(replayed(client)) == 64


def test_a_subscriber_that_reads_nothing_delays_nobody_and_catches_up(stage: Stage) -> None:
    subscriber = stage.subscribe()
    with Loop(stage.publisher) as loop:
        total = loop.publish_until(subscriber.receive, 0)
        for number in range(total, total + 5000):
            loop.events.put(BlockStored([key(number)], None, [2**31 - 1] * 256, 256))
        loop.events.join()
        total = loop.publish_until(lambda _: _caught_up(subscriber, total + 5000), total + 5000)
        assert subscriber.num_replays >= 2
        loop.take_rest(subscriber)
    assert subscriber.view.keys == {key(number) for number in range(total)}


def _caught_up(subscriber: Subscriber, count: int) -> bool:
    while subscriber.receive(0.05):
        pass
    return len(subscriber.view.keys) >= count


def test_a_restart_is_a_gap_whose_replay_begins_with_nothing_cached(stage: Stage) -> None:
    subscriber = stage.subscribe()
    with Loop(stage.publisher) as loop:
        total = loop.publish_until(subscriber.receive, 0)
    last = subscriber.last_number
    stage.restart()
    with Loop(stage.publisher) as loop:
        end = loop.publish_until(subscriber.receive, total)
        loop.take_rest(subscriber)
    assert subscriber.last_number is not None
    assert last is not None
    assert subscriber.last_number > last
    assert subscriber.view.keys == {key(number) for number in range(total, end)}


def test_connections_without_a_handshake_are_sent_away_beyond_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "MAX_STRANGERS", 4)
    monkeypatch.setattr(door, "HANDSHAKE_S", 600.0)  # nobody is sent away for being slow
    stage = Stage()
    try:
        for port in (stage.port, stage.port + 1):
            crowd = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(6)]
            for silent in crowd[:2]:  # the oldest ones
                while silent.recv(4096):
                    pass
            for silent in crowd:
                silent.close()
        assert len(ask(stage, 0)) == 1
    finally:
        stage.close()


def test_a_port_that_is_taken_is_named(stage: Stage) -> None:
    for port, taken in ((stage.port, stage.port), (stage.port - 1, stage.port)):
        config = KVEventsAddress("127.0.0.1", port)
        with pytest.raises(ConfigError, match=f"port {taken} of 127.0.0.1, which is taken"):
            KVEventPublisher(config, 0, 1, stage.context)


def test_a_host_that_is_elsewhere_is_named(stage: Stage) -> None:
    for host in ("192.0.2.77", "nowhere.invalid"):
        with pytest.raises(ConfigError, match=f"names {host}, which is no address of this host"):
            KVEventPublisher(KVEventsAddress(host, stage.port), 0, 1, stage.context)
