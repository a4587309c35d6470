# SPDX-License-Identifier: Apache-2.0
"""Doors: strangers cost a listening socket little, and those with the key come in all the same."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from pagoda.ipc import door
from pagoda.ipc.curve import encrypt_client, encrypt_server, keys_of, start_authenticator
from pagoda.ipc.door import FRAME_BYTES, Door, guard, pieces
from pagoda.ipc.event_socket import EventSocket, host_socket

KEYS = keys_of(b"a secret")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\0" + bytes(31)


@contextmanager
def bound(kind: int = zmq.ROUTER) -> Iterator[tuple[zmq.Socket[bytes], int]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    start_authenticator(context, KEYS)
    server = host_socket(context, kind)
    encrypt_server(server, KEYS)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield server, port
    finally:
        server.close()
        context.term()


def stranger(port: int, frame_bytes: int = 0) -> socket.socket:
    """A connection that sends what comes before a handshake: of a frame of this length, all but the end."""
    stream = socket.create_connection(("127.0.0.1", port), timeout=60)
    stream.sendall(GREETING)
    if frame_bytes:
        with suppress(ConnectionError):
            stream.sendall(b"\x06" + struct.pack(">Q", frame_bytes))
            for _ in range(min(4, frame_bytes // 2**20)):
                stream.sendall(bytes(2**20))
    return stream


def until_closed(stream: socket.socket) -> None:
    with suppress(ConnectionError):
        while stream.recv(4096):
            pass


def ask(port: int, payload: bytes) -> zmq.Socket[bytes]:
    """A peer with the key that has sent a message."""
    client = zmq.Context().socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    encrypt_client(client, KEYS)
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send_multipart(pieces(payload))
    return client


@given(st.integers(0, 200_000))
def test_pieces_are_short_and_the_whole(size: int) -> None:
    payload = bytes(range(256)) * (size // 256 + 1)
    frames = pieces(payload[:size])
    assert b"".join(frames) == payload[:size]
    assert all(len(frame) + 64 < FRAME_BYTES for frame in frames)


def test_a_long_frame_before_the_handshake_ends_its_connection_and_long_messages_still_come() -> (
    None
):
    with bound() as (server, port):
        for frame_bytes in (FRAME_BYTES + 1, 60 * 2**20, 2**63 - 1):
            with stranger(port, frame_bytes) as stream:
                until_closed(stream)
        client = ask(port, b"x" * 2**24)
        assert server.poll(60_000)
        _, *frames = server.recv_multipart()
        assert b"".join(frames) == b"x" * 2**24
        client.context.destroy(linger=0)


async def test_strangers_are_sent_away_beyond_a_number_and_peers_come_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "MAX_STRANGERS", 8)
    monkeypatch.setattr(door, "HANDSHAKE_S", 600.0)  # nobody is sent away for being slow
    with bound() as (server, port):
        heard = asyncio.Event()
        events = EventSocket(server, lambda _: heard.set(), lambda: None)
        crowd = [stranger(port) for _ in range(8)]
        late = [stranger(port) for _ in range(3)]
        for stream in crowd[:3]:  # the oldest ones
            await asyncio.to_thread(until_closed, stream)
        client = ask(port, b"hello")
        await asyncio.wait_for(heard.wait(), 60)
        for stream in (*crowd, *late):
            stream.close()
        client.context.destroy(linger=0)
        events.close()


def test_a_guard_keeps_the_door_until_the_socket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_STRANGERS", 4)
    monkeypatch.setattr(door, "HANDSHAKE_S", 600.0)
    with bound() as (server, port):
        guard(server)
        crowd = [stranger(port) for _ in range(6)]
        for stream in crowd[:2]:
            until_closed(stream)
        for stream in crowd:
            stream.close()


def event(kind: int, fd: int) -> list[bytes]:
    return [struct.pack("=HI", kind, fd), b"tcp://127.0.0.1:1"]


def test_those_that_have_passed_or_gone_or_are_old_are_no_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, sent_away = [0.0], []
    monkeypatch.setattr(door, "_origin", lambda fd: f"10.0.0.{fd // 1000}")
    monkeypatch.setattr(door, "_hang_up", sent_away.append)
    monkeypatch.setattr(door, "MAX_STRANGERS", 10)
    kept = Door(lambda: now[0])
    for fd in range(100):  # a fleet that joins at once
        assert not kept.take(event(zmq.EVENT_ACCEPTED, fd))
        assert not kept.take(event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0))
    for fd in range(100, 120):
        kept.take(event(zmq.EVENT_ACCEPTED, fd))
        assert kept.take(event(zmq.EVENT_DISCONNECTED, fd))
    assert not sent_away
    now[0] = door.HANDSHAKE_S + 1
    kept.take(event(zmq.EVENT_ACCEPTED, 1))
    for fd in range(1000, 1015):
        kept.take(event(zmq.EVENT_ACCEPTED, fd))
    assert sent_away == list(range(1000, 1006))  # those of the crowd, not the one from elsewhere


def test_a_descriptor_that_is_a_file_by_now_costs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections may have gone, and something else have their numbers, before anybody looks."""
    monkeypatch.setattr(door, "MAX_STRANGERS", 0)
    kept = Door()
    with (tmp_path / "f").open("wb") as file:
        before = os.listdir("/proc/self/fd")
        for _ in range(8):
            kept.take(event(zmq.EVENT_ACCEPTED, file.fileno()))
        assert len(os.listdir("/proc/self/fd")) == len(before)
        file.write(b"x")
