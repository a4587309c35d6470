# SPDX-License-Identifier: Apache-2.0
"""Strangers without the secret learn nothing and do no harm; readers get no more than is exported."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from transport_rig import SECRET, House, make, read, soon

from pagoda.errors import TransportError
from pagoda.plugins.disaggregation.transport import stream_server, tcp
from pagoda.plugins.disaggregation.transport.base import MemorySpan
from pagoda.plugins.disaggregation.transport.proof import Prover
from pagoda.plugins.disaggregation.transport.shm import ShmDescriptor
from pagoda.plugins.disaggregation.transport.tcp import TcpDescriptor


class Door(House):
    """A house with a door at which one can knock without saying anything."""

    def knock(self) -> socket.socket:
        if self.name == "shm":
            shm = msgspec.msgpack.decode(self.exported.descriptor, type=ShmDescriptor)
            stream = socket.socket(socket.AF_UNIX)
            stream.connect(f"\0{shm.name}")
        else:
            stream = socket.create_connection((self.tcp.host, self.tcp.port))
        stream.settimeout(20)
        return stream

    @property
    def tcp(self) -> TcpDescriptor:
        return msgspec.msgpack.decode(self.exported.descriptor, type=TcpDescriptor)

    def at(self, port: int) -> bytes:
        """Returns a descriptor of the same memory at another port."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self.tcp, port=port))


@pytest.fixture(params=["shm", "tcp"])
def house(request: pytest.FixtureRequest) -> Iterator[Door]:
    with contextlib.closing(Door(request.param)) as house:
        yield house


@pytest.fixture
def tcp_house() -> Iterator[Door]:
    with contextlib.closing(Door("tcp")) as house:
        yield house


def drain(stream: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := stream.recv(2**16):
            parts.append(part)
    stream.close()
    return b"".join(parts)


def test_another_secret_does_not_open(house: Door) -> None:
    wrong = make(house.name, house.ours, b"another secret of another")
    with pytest.raises(TransportError, match="cluster's key"):
        wrong.connect(house.exported.descriptor, soon())
    house.check()


def test_a_door_that_does_not_know_the_secret_is_not_believed(house: Door) -> None:
    exported = make(house.name, house.theirs, b"another secret of another").export()
    with pytest.raises(TransportError):
        house.transport.connect(exported.descriptor, soon())
    exported.close()


def test_another_door_at_the_same_place_is_not_taken_for_it(house: Door) -> None:
    """The process was started again, and its successor has the port."""
    kind = ShmDescriptor if house.name == "shm" else TcpDescriptor
    descriptor = msgspec.msgpack.decode(house.exported.descriptor, type=kind)
    stale = msgspec.structs.replace(descriptor, export_id=bytes(16))
    with pytest.raises(TransportError, match="another's by now"):
        house.transport.connect(msgspec.msgpack.encode(stale), soon())


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, b"\xff" * 2**20, b"\x16\x03\x01\xff\xff"]
)
def test_garbage_is_answered_with_nothing(house: Door, said: bytes) -> None:
    stream = house.knock()
    with contextlib.suppress(OSError):  # it may have hung up by now
        stream.sendall(said)
        stream.shutdown(socket.SHUT_WR)
    assert len(drain(stream)) <= 64, "a nonce or a TLS alert"
    house.check()


@pytest.mark.parametrize("pause_s", [20.0, 0.05], ids=["silent", "slow"])
def test_who_is_slow_is_sent_away(
    house: Door, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "HANDSHAKE_S", 0.3)
    stream = house.knock()
    ended = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for byte in b"\x16\x03\x01\x01\x00" + bytes(256):
                if ended.wait(pause_s):
                    return
                stream.send(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    drain(stream.dup())
    ended.set()
    thread.join()
    stream.close()
    house.check()


def test_a_crowd_does_not_keep_readers_out(house: Door) -> None:
    crowd = [house.knock() for _ in range(5 * stream_server.MAX_STRANGERS)]
    house.check()
    threads = [thread for thread in threading.enumerate() if f"kv-{house.name}" in thread.name]
    assert len(threads) <= 2 * stream_server.MAX_STRANGERS + 2
    for stream in crowd:
        stream.close()


def test_a_crowd_from_elsewhere_sends_no_reader_away(tcp_house: Door) -> None:
    """One that is slow with its proof keeps its place."""
    remote = tcp_house.tcp
    reader = tcp_house.knock()
    crowd = [
        socket.create_connection((remote.host, remote.port), 20, ("127.0.0.2", 0))
        for _ in range(2 * stream_server.MAX_STRANGERS)
    ]
    assert drain(crowd[0]) == b"", "the first of them was sent away for others"
    enter(tcp_house, reader).close()
    for stream in crowd:
        stream.close()


def test_a_reader_that_was_sent_away_comes_again(
    house: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    prover = house.exported.prover  # type: ignore[attr-defined]
    admit, turns = prover.admit, itertools.count()

    def admit_the_third(stream: socket.socket, channel: bytes, deadline: float) -> int:
        turn = next(turns)
        if turn == 1:
            stream.sendall(bytes(32))
            stream.recv(2**10)
        if turn < 2:
            raise TransportError("sent away")
        wish: int = admit(stream, channel, deadline)
        return wish

    monkeypatch.setattr(prover, "admit", admit_the_third)
    house.check()
    assert next(turns) == 3


def test_strangers_cannot_ask_for_what_costs_much(tcp_house: Door) -> None:
    slow = tcp.tls_context(tcp.ssl.PROTOCOL_TLS_CLIENT, tcp.ENCRYPTED)
    with pytest.raises(OSError, match="handshake failure"):
        slow.wrap_socket(tcp_house.knock())


def test_the_door_closes_with_a_crowd_before_it(house: Door) -> None:
    crowd = [house.knock() for _ in range(10)]
    house.exported.close()
    for stream in crowd:
        assert len(drain(stream)) <= 64
    assert not [t for t in threading.enumerate() if f"kv-{house.name}" in t.name]


# ---- readers that misbehave


def prove(house: Door, stream: socket.socket) -> tcp.ssl.SSLSocket:
    """A channel of a reader that has proved that it knows the secret."""
    channel = tcp.tls_context(tcp.ssl.PROTOCOL_TLS_CLIENT).wrap_socket(stream)
    prover = Prover(SECRET, house.tcp.export_id)
    prover.enter(channel, tcp.channel_binding(channel), 0, soon())
    return channel


def enter(house: Door, stream: socket.socket | None = None) -> socket.socket:
    """A reader's stream, to say on it what one likes; `stream` has not said anything yet."""
    bare = tcp.unwrap(prove(house, stream or house.knock()), soon())
    bare.settimeout(20)
    return bare


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", tcp.MAX_SPANS + 1),
        struct.pack("<IIQQ", 1, 0, 0, 0),
        struct.pack("<IIQQ", 1, 0, 2**64 - 1, 2),
        struct.pack("<IIQQ", 1, 0, 0, 2**64 - 1),
        struct.pack("<IIQQ", 1, 2**32 - 1, 0, 1),
        struct.pack("<I", 3),  # and nothing more
        struct.pack("<I", tcp.MAX_SPANS) + struct.pack("<IQQ", 2, 0, 3 * 2**20) * tcp.MAX_SPANS,
    ],
    ids=lambda said: said[:20].hex(),
)
def test_requests_that_make_no_sense_end_the_stream(
    tcp_house: Door, request_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_SILENCE_S", 0.2)
    stream = enter(tcp_house)
    stream.sendall(request_bytes)
    assert drain(stream) == b""
    tcp_house.check()


def test_a_reader_that_does_not_take_what_it_asked_for_is_sent_away(
    tcp_house: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_SILENCE_S", 0.2)
    stream = enter(tcp_house)
    count = 300
    asked = struct.pack("<I", count) + struct.pack("<IQQ", 2, 0, 3 * 2**20) * count
    stream.sendall(asked)
    served = [thread for thread in threading.enumerate() if thread.name == "kv-tcp-export"][1:]
    assert len(served) == 1, "besides the one that accepts"
    served[0].join(20)
    assert not served[0].is_alive()
    assert len(drain(stream)) < count * 3 * 2**20
    tcp_house.check()


def test_a_door_that_falls_silent_is_given_up(
    tcp_house: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_SILENCE_S", 0.2)
    link = tcp_house.connect()
    is_over = threading.Event()
    monkeypatch.setattr(tcp, "_send", lambda _stream, _pieces: is_over.wait(20))
    with pytest.raises(TransportError, match="timed out"):
        read(link, tcp_house.whole)
    link.close()
    is_over.set()


def test_memory_that_was_handed_over_cannot_be_written_to_or_cut() -> None:
    house = Door("shm")
    house.check()
    file = house.theirs.own.file
    assert file is not None
    with pytest.raises(PermissionError):
        mmap.mmap(file.descriptor, file.num_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(file.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(file.descriptor, 0)
    before = house.theirs.bytes_of(0, 0, 4)
    house.theirs.memory[0:4] = b"ours"  # as whoever handed it over can
    assert house.theirs.bytes_of(0, 0, 4) == b"ours" != before
    house.close()


def test_a_host_that_encrypts_takes_no_reader_that_does_not(tcp_house: Door) -> None:
    tcp_house.exported.close()
    tcp_house.exported = make("tcp", tcp_house.theirs, encrypts=True).export()
    channel = prove(tcp_house, tcp_house.knock())
    assert channel.recv(100) == b""
    channel.close()
    tcp_house.check()


@contextlib.contextmanager
def eavesdropper(port: int) -> Iterator[tuple[int, bytearray]]:
    """Gives a port that passes on one connection to `port`, and all that goes over it."""
    heard = bytearray()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(2**16):
            heard.extend(data)
            target.sendall(data)
        with contextlib.suppress(OSError):  # the other side has hung up as well
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with (
            listener.accept()[0] as reader,
            socket.create_connection(("127.0.0.1", port)) as exporter,
            ThreadPoolExecutor() as ways,
        ):
            ways.submit(pass_on, reader, exporter)
            ways.submit(pass_on, exporter, reader)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        serving = pool.submit(serve)
        yield listener.getsockname()[1], heard
        serving.result(20)


@pytest.mark.parametrize("encrypts", [False, True])
def test_encrypted_bytes_cannot_be_read_on_the_way(tcp_house: Door, encrypts: bool) -> None:
    with eavesdropper(tcp_house.tcp.port) as (port, heard):
        link = make("tcp", tcp_house.ours, encrypts=encrypts).connect(tcp_house.at(port), soon())
        read(link, MemorySpan(0, 0, 10_000, tcp_house.ours.address(0)))
        link.close()
    wanted = tcp_house.theirs.bytes_of(0, 0, 10_000)
    assert tcp_house.ours.bytes_of(0, 0, 10_000) == wanted
    assert (wanted in bytes(heard)) == (not encrypts)


def test_who_stands_in_the_middle_cannot_pass_proofs_on(tcp_house: Door) -> None:
    """Two channels, one to each side, have two names; a proof for one is none for the other."""
    server, client = (
        tcp.tls_context(side) for side in (tcp.ssl.PROTOCOL_TLS_SERVER, tcp.ssl.PROTOCOL_TLS_CLIENT)
    )

    def stand_between() -> bytes:
        with (
            server.wrap_socket(listener.accept()[0], server_side=True) as inside,
            client.wrap_socket(tcp_house.knock()) as outside,
        ):
            inside.sendall(outside.recv(32))
            outside.sendall(inside.recv(65))
            return outside.recv(32)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        standing = pool.submit(stand_between)
        with pytest.raises(TransportError):
            tcp_house.transport.connect(tcp_house.at(listener.getsockname()[1]), soon())
        assert standing.result(20) == b"", "the exporter proved nothing"
