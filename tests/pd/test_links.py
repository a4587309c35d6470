"""The sockets between engines: who gets in, what is understood, and how a loss is noticed."""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from pagoda.engine.config import HandoffConfig
from pagoda.errors import ConfigError
from pagoda.ipc.curve import encrypt_client, encrypt_server, keys_of, start_authenticator
from pagoda.messages.transfers import KVPeer
from pagoda.messages.worker_config import CurveKeys, Role
from pagoda.pd.links import HandoffLinks, PeerLost, open_links
from pagoda.pd.messages import (
    DecodeMessage,
    KVBlocks,
    KVHello,
    KVRelease,
    KVRenew,
    KVWelcome,
    PrefillMessage,
)

KEYS = keys_of(b"a secret of all hosts")
OTHER_KEYS = keys_of(b"another secret, of others")
WELCOME = KVWelcome(engine_id="e", peer=KVPeer(peer_id="e-1", ranks=()), lease_s=30.0)
TIMEOUT_MS = 10_000
NO_TEXT = b"\x82\xa4type\xaakv_dropped\xabtransfer_id\xa2\xff\xfe"
DEEP = b"\x82\xa4type\xaakv_dropped\xa4more" + b"\x91" * 100_000


def links_of(role: Role, keys: CurveKeys = KEYS, port: int = 0) -> HandoffLinks:
    config = HandoffConfig(role=role, host="127.0.0.1", port=port, keys=keys)
    return open_links(config, replica=0)


class PrefillPeer:
    """The side that is asked."""

    def __init__(self, port: int = 0) -> None:
        self.links = links_of(Role.PREFILL, port=port)
        assert self.links.listener is not None
        assert self.links.peers is None
        self.listener = self.links.listener

    @property
    def address(self) -> str:
        return self.listener.address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def receive(self) -> list[tuple[bytes, DecodeMessage]]:
        assert zmq.zmq_poll([(it, zmq.POLLIN) for it in self.listener.pollables()], TIMEOUT_MS)
        return self.listener.receive()

    def close(self) -> None:
        self.links.close()


class Asker:
    """The side that asks."""

    def __init__(self, keys: CurveKeys = KEYS) -> None:
        self.links = links_of(Role.DECODE, keys)
        assert self.links.peers is not None
        assert self.links.listener is None
        self.peers = self.links.peers

    def receive(self) -> list[tuple[str, PrefillMessage | PeerLost]]:
        """Waits for messages and returns them."""
        while True:
            messages = self.peers.receive()
            if messages:
                return messages
            sources = [(it, zmq.POLLIN) for it in self.peers.pollables()]
            assert zmq.zmq_poll(sources, TIMEOUT_MS), "nothing comes"

    def close(self) -> None:
        self.links.close()


@pytest.fixture
def exporter() -> Iterator[PrefillPeer]:
    with closing(PrefillPeer()) as exporter:
        yield exporter


@pytest.fixture
def asker() -> Iterator[Asker]:
    with closing(Asker()) as asker:
        yield asker


def test_both_sides_speak(exporter: PrefillPeer, asker: Asker) -> None:
    asker.peers.send(exporter.address, KVHello(digest="d"))
    ((who, message),) = exporter.receive()
    assert message == KVHello(digest="d")
    exporter.listener.send(who, WELCOME)
    blocks = KVBlocks("t", "e-1", 0, list(range(10_000)), b"k" * 32, 10_000)
    exporter.listener.send(who, blocks)
    received = asker.receive()
    while len(received) < 2:
        received += asker.receive()
    assert received == [(exporter.address, WELCOME), (exporter.address, blocks)]


def test_one_engine_asks_at_several(asker: Asker) -> None:
    with closing(PrefillPeer()) as first, closing(PrefillPeer()) as second:
        exporters = (first, second)
        for exporter in exporters:
            asker.peers.send(exporter.address, KVRenew([exporter.address]))
        for exporter in exporters:
            ((_, message),) = exporter.receive()
            assert message == KVRenew([exporter.address])
        assert len(asker.peers.pollables()) == 4
        for exporter in exporters:
            asker.peers.hang_up(exporter.address)
        assert asker.peers.pollables() == []


def test_who_has_another_secret_is_not_heard(exporter: PrefillPeer) -> None:
    with closing(Asker(OTHER_KEYS)) as stranger:
        stranger.peers.send(exporter.address, KVRelease(["t"]))
        ((address, loss),) = stranger.receive()
        assert address == exporter.address
        assert isinstance(loss, PeerLost)
        assert exporter.listener.receive() == []
        assert stranger.peers.pollables() == []


def test_who_has_the_doors_key_but_not_the_askers_is_told_why(exporter: PrefillPeer) -> None:
    keys = CurveKeys(
        KEYS.server_key, OTHER_KEYS.public_key, OTHER_KEYS.secret_key, OTHER_KEYS.server_secret_key
    )
    with closing(Asker(keys)) as stranger:
        stranger.peers.send(exporter.address, KVRelease(["t"]))
        ((_, loss),) = stranger.receive()
        assert loss == PeerLost("it has another --cluster-key-file")
        assert exporter.listener.receive() == []


def test_garbage_at_the_door_is_passed_over(
    exporter: PrefillPeer, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        encrypt_client(socket, KEYS)
        socket.connect(exporter.address)
        garbage = (b"", b"\xff" * 100, b"\x81\xa4type\xackv_subscribe", NO_TEXT, DEEP)
        for payload in garbage:
            socket.send(payload)
        socket.send_multipart([b"in", b"parts"])
        seen = 0
        while seen <= len(garbage):
            assert exporter.receive() == []
            seen = sum("not a message" in record.message for record in caplog.records)
        socket.close(linger=0)
    context.term()
    asker.peers.send(exporter.address, KVRenew([]))
    assert [message for _, message in exporter.receive()] == [KVRenew([])]


@pytest.mark.parametrize("garbage", [b"garbage", NO_TEXT, DEEP])
def test_who_sends_garbage_is_let_go(asker: Asker, garbage: bytes) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    start_authenticator(context, KEYS)
    with context.socket(zmq.ROUTER) as socket:
        encrypt_server(socket, KEYS)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        asker.peers.send(address, KVHello(digest="d"))
        who, _ = socket.recv_multipart()
        socket.send_multipart([who, garbage])
        ((whom, loss),) = asker.receive()
        assert whom == address
        assert isinstance(loss, PeerLost)
        assert "not a message" in loss.reason
        socket.close(linger=0)
    context.term()


def test_nobody_is_there(asker: Asker) -> None:
    with sockets.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    asker.peers.send(address, KVHello(digest="d"))
    assert asker.receive() == [(address, PeerLost("nobody is there"))]
    assert asker.peers.pollables() == []


@pytest.mark.parametrize("address", ["tcp://", "http://127.0.0.1:1", "tcp://127.0.0.1:x", ""])
def test_an_address_that_is_none(asker: Asker, address: str) -> None:
    asker.peers.send(address, KVHello(digest="d"))
    ((whom, loss),) = asker.receive()
    assert whom == address
    assert isinstance(loss, PeerLost)
    assert "cannot be reached" in loss.reason


def test_one_that_ends_is_noticed_and_its_successor_is_another(asker: Asker) -> None:
    first = PrefillPeer()
    port = first.port
    asker.peers.send(first.address, KVHello(digest="d"))
    ((who, _),) = first.receive()
    first.listener.send(who, WELCOME)
    first.close()
    messages = asker.receive()
    while not isinstance(messages[-1][1], PeerLost):
        messages += asker.receive()
    assert [message for _, message in messages] == [WELCOME, PeerLost("it hung up")], (
        "its last word is not overlooked"
    )
    with closing(PrefillPeer(port)) as second:
        asker.peers.send(second.address, KVHello(digest="again"))
        ((_, message),) = second.receive()
        assert message == KVHello(digest="again"), "nothing that was meant for the first"


def test_last_words_go_out(exporter: PrefillPeer) -> None:
    asker = Asker()
    asker.peers.send(exporter.address, KVRelease(["t"]))
    asker.close()
    assert [message for _, message in exporter.receive()] == [KVRelease(["t"])]


def test_a_word_to_who_is_gone_is_lost(exporter: PrefillPeer, asker: Asker) -> None:
    asker.peers.send(exporter.address, KVHello(digest="d"))
    ((who, _),) = exporter.receive()
    asker.peers.hang_up(exporter.address)
    for _ in range(1000):
        exporter.listener.send(who, WELCOME)
    exporter.listener.send(b"who?", WELCOME)


def test_a_port_that_is_taken_is_refused_in_a_sentence(exporter: PrefillPeer) -> None:
    with pytest.raises(ConfigError, match=r"fetch KV on 127\.0\.0\.1"):
        links_of(Role.BOTH, port=exporter.port)


def test_a_name_is_looked_up_by_who_has_it() -> None:
    config = HandoffConfig(role=Role.PREFILL, host="localhost", keys=KEYS)
    with closing(open_links(config, replica=0)) as links:
        assert links.listener is not None
        assert links.listener.address.startswith("tcp://127.0.0.1:")
    with pytest.raises(ConfigError, match=r"host\.invalid has no address"):
        open_links(HandoffConfig(role=Role.PREFILL, host="host.invalid", keys=KEYS), replica=0)


def test_replicas_have_ports_of_their_own(exporter: PrefillPeer) -> None:
    config = HandoffConfig(role=Role.PREFILL, host="127.0.0.1", port=exporter.port - 1, keys=KEYS)
    with pytest.raises(ConfigError, match=f":{exporter.port} "):
        open_links(config, replica=1)
