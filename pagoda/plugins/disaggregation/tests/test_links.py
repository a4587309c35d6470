# SPDX-License-Identifier: Apache-2.0
"""The sockets between engines: who gets in, what is understood, and how a loss is noticed."""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import zmq

from pagoda.errors import ConfigError
from pagoda.ipc.curve import encrypt_client, encrypt_server, keys_of, start_authenticator
from pagoda.ipc.door import pieces
from pagoda.messages.engine_config import HandoffConfig
from pagoda.messages.transfers import KVPeer
from pagoda.messages.worker_config import CurveKeys, Role
from pagoda.plugins.disaggregation.hooks import HandoffLinks, open_links
from pagoda.plugins.disaggregation.links import KVListener, PeerLost, Peers
from pagoda.plugins.disaggregation.messages import (
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


Heard = tuple[str, PrefillMessage | PeerLost]


def links_of(role: Role, keys: CurveKeys = KEYS, port: int = 0) -> HandoffLinks:
    return open_links(HandoffConfig(role=role, host="127.0.0.1", port=port, keys=keys), replica=0)


def until_readable(link: KVListener | Peers) -> None:
    assert zmq.zmq_poll([(it, zmq.POLLIN) for it in link.pollables()], TIMEOUT_MS), "nothing comes"


def asked(listener: KVListener) -> list[tuple[bytes, DecodeMessage]]:
    until_readable(listener)
    return listener.receive()


def heard(peers: Peers, count: int = 1) -> list[Heard]:
    """Waits for so many messages, and returns all that have come."""
    messages: list[Heard] = []
    while len(messages) < count:
        messages += peers.receive()
        if len(messages) < count:
            until_readable(peers)
    return messages


def assert_lost(peers: Peers, address: str, reason: str) -> None:
    ((whom, loss),) = heard(peers)
    assert whom == address
    assert isinstance(loss, PeerLost)
    assert loss.reason.startswith(reason)
    assert peers.pollables() == []


@contextmanager
def listening(port: int = 0) -> Iterator[KVListener]:
    """The side that is asked."""
    with closing(links_of(Role.PREFILL, port=port)) as links:
        assert links.listener is not None
        assert links.peers is None
        yield links.listener


@contextmanager
def asking(keys: CurveKeys = KEYS) -> Iterator[Peers]:
    """The side that asks."""
    with closing(links_of(Role.DECODE, keys)) as links:
        assert links.peers is not None
        assert links.listener is None
        yield links.peers


def port_of(listener: KVListener) -> int:
    return int(listener.address.rpartition(":")[2])


@pytest.fixture
def listener() -> Iterator[KVListener]:
    with listening() as listener:
        yield listener


@pytest.fixture
def peers() -> Iterator[Peers]:
    with asking() as peers:
        yield peers


def test_both_sides_speak(listener: KVListener, peers: Peers) -> None:
    peers.send(listener.address, KVHello(digest="d"))
    ((who, message),) = asked(listener)
    assert message == KVHello(digest="d")
    blocks = KVBlocks("t", "e-1", 0, 10_000, [list(range(10_000))], b"k" * 32, 10_000)
    listener.send(who, WELCOME)
    listener.send(who, blocks)
    assert heard(peers, 2) == [(listener.address, WELCOME), (listener.address, blocks)]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (OTHER_KEYS, "it "),
        (
            CurveKeys(
                KEYS.server_key,
                OTHER_KEYS.public_key,
                OTHER_KEYS.secret_key,
                OTHER_KEYS.server_secret_key,
            ),
            "it has another --cluster-key-file",
        ),
    ],
    ids=["another secret", "the door's key, and another of its own"],
)
def test_who_has_another_secret_is_not_heard(
    listener: KVListener, keys: CurveKeys, reason: str
) -> None:
    with asking(keys) as stranger:
        stranger.send(listener.address, KVRelease(["t"]))
        assert_lost(stranger, listener.address, reason)
        assert listener.receive() == []


def test_garbage_at_the_door_is_passed_over(
    listener: KVListener, peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        encrypt_client(socket, KEYS)
        socket.connect(listener.address)
        garbage = (b"", b"\xff" * 100, b"\x81\xa4type\xackv_subscribe", NO_TEXT, DEEP)
        for payload in garbage:
            socket.send_multipart(pieces(payload))
        socket.send_multipart([b"in", b"parts"])
        seen = 0
        while seen <= len(garbage):
            assert asked(listener) == []
            seen = sum("not a message" in record.message for record in caplog.records)
    peers.send(listener.address, KVRenew([]))
    assert [message for _, message in asked(listener)] == [KVRenew([])]


@pytest.mark.parametrize("garbage", [b"garbage", NO_TEXT, DEEP])
def test_who_sends_garbage_is_let_go(peers: Peers, garbage: bytes) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    start_authenticator(context, KEYS)
    with context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        encrypt_server(socket, KEYS)
        address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        peers.send(address, KVHello(digest="d"))
        who, _ = socket.recv_multipart()
        socket.send_multipart([who, garbage])
        assert_lost(peers, address, "it sent what is not a message")


def test_nobody_is_there(peers: Peers) -> None:
    with sockets.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    peers.send(address, KVHello(digest="d"))
    assert_lost(peers, address, "nobody is there")


@pytest.mark.parametrize("address", ["tcp://", "http://127.0.0.1:1", "tcp://127.0.0.1:x", ""])
def test_an_address_that_is_none(peers: Peers, address: str) -> None:
    peers.send(address, KVHello(digest="d"))
    assert_lost(peers, address, "it cannot be reached")


def test_one_that_ends_is_noticed_and_its_successor_is_another(peers: Peers) -> None:
    with listening() as first:
        port = port_of(first)
        peers.send(first.address, KVHello(digest="d"))
        ((who, _),) = asked(first)
        first.send(who, WELCOME)
    assert [message for _, message in heard(peers, 2)] == [WELCOME, PeerLost("it hung up")], (
        "its last word is not overlooked"
    )
    with listening(port) as second:
        peers.send(second.address, KVHello(digest="again"))
        ((_, message),) = asked(second)
        assert message == KVHello(digest="again"), "nothing that was meant for the first"


def test_last_words_go_out(listener: KVListener) -> None:
    with asking() as peers:
        peers.send(listener.address, KVRelease(["t"]))
    assert [message for _, message in asked(listener)] == [KVRelease(["t"])]


def test_a_word_to_who_is_gone_is_lost(listener: KVListener, peers: Peers) -> None:
    peers.send(listener.address, KVHello(digest="d"))
    ((who, _),) = asked(listener)
    peers.hang_up(listener.address)
    for _ in range(1000):
        listener.send(who, WELCOME)
    listener.send(b"who?", WELCOME)


@pytest.mark.parametrize("replica", [0, 1])
def test_a_port_that_is_taken_is_refused_in_a_sentence(listener: KVListener, replica: int) -> None:
    """Each replica of a host has a port of its own."""
    port = port_of(listener) - replica
    config = HandoffConfig(role=Role.BOTH, host="127.0.0.1", port=port, keys=KEYS)
    with pytest.raises(ConfigError, match=rf"fetch KV on 127\.0\.0\.1:{port + replica} "):
        open_links(config, replica)


def test_a_name_is_looked_up_by_who_has_it() -> None:
    config = HandoffConfig(role=Role.PREFILL, host="localhost", keys=KEYS)
    with closing(open_links(config, replica=0)) as links:
        assert links.listener is not None
        assert links.listener.address.startswith("tcp://127.0.0.1:")
    with pytest.raises(ConfigError, match=r"host\.invalid has no address"):
        open_links(HandoffConfig(role=Role.PREFILL, host="host.invalid", keys=KEYS), replica=0)
