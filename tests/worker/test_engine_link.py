# SPDX-License-Identifier: Apache-2.0
"""A worker's end of the engine's socket, with the other end played by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pagoda.ipc.codec import Codec
from pagoda.messages.tracing import ClockPing, ClockPong, StopTrace
from pagoda.messages.worker import (
    StepPlan,
    TokenMasks,
    WorkerHello,
    WorkerMessage,
    WorkerOrder,
    WorkerPeers,
    WorkerProgress,
)
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker import engine_link
from pagoda.worker.engine_link import EngineLink


class EngineSide:
    """Says what it is told to, when it is told to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self._decode = Codec[WorkerMessage](WorkerMessage).decode
        self._encode = Codec[WorkerOrder](WorkerOrder).encode
        self._worker = b""

    def hear(self) -> WorkerMessage:
        """The next message, without the first one, which only says that the worker is there."""
        message: WorkerMessage = WorkerProgress()
        while isinstance(message, WorkerProgress):
            self._worker, payload = self._socket.recv_multipart()
            message = self._decode(payload)
        return message

    def say(self, message: WorkerOrder | WorkerPeers) -> None:
        self._socket.send_multipart([self._worker, self._encode(message)])


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[EngineSide, EngineLink]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path / 'w'}"
    yield EngineSide(context, address), EngineLink(context, address, WorkerConfig(model="m"))
    context.destroy(linger=0)


def test_an_answer_that_comes_too_late_is_no_answer_to_anything_else(
    ends: tuple[EngineSide, EngineLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, link = ends
    monkeypatch.setattr(engine_link, "_PONG_MS", 1)
    link.compare_clocks(Tracer("worker"))  # in vain
    ping = engine.hear()
    assert isinstance(ping, ClockPing)
    hello = WorkerHello(host="h")
    for message in (
        ClockPong(ping.number, "engine", 5),
        WorkerPeers(hellos=[hello]),
        ClockPong(ping.number, "engine", 5),
        StopTrace(),
    ):
        engine.say(message)
    peers = link.meet_peers(hello)
    assert engine.hear() == hello
    assert peers.hellos == [hello]
    assert isinstance(link.receive(), StopTrace)


def test_masks_are_found_among_later_orders(ends: tuple[EngineSide, EngineLink]) -> None:
    engine, link = ends
    link.send(ClockPing(0))
    engine.hear()
    plan = StepPlan(5, [0], [1])
    engine.say(TokenMasks(3))  # of a step that needed none in the end
    engine.say(plan)
    engine.say(TokenMasks(4, {0: b"\x01"}))
    engine.say(TokenMasks(5, {}, {0: 7}))
    assert link.await_masks(4) == TokenMasks(4, {0: b"\x01"})
    assert link.await_masks(5) == TokenMasks(5, {}, {0: 7})
    assert link.receive() == plan


def test_masks_that_come_while_a_stage_is_awaited_are_kept(
    ends: tuple[EngineSide, EngineLink],
) -> None:
    engine, link = ends
    link.send(ClockPing(0))
    engine.hear()
    bell = os.eventfd(0)
    try:
        engine.say(TokenMasks(5, {0: b"\x01"}))
        engine.say(StepPlan(6, [0], [1]))
        assert isinstance(link.receive([bell]), StepPlan)
        os.eventfd_write(bell, 1)
        assert link.receive([bell]) is None
        assert link.await_masks(5) == TokenMasks(5, {0: b"\x01"})
    finally:
        os.close(bell)


def test_only_waiting_for_an_order_is_idle(
    ends: tuple[EngineSide, EngineLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, link = ends
    link.send(ClockPing(2))
    engine.hear()
    times = iter((10.0, 13.0))

    def clock() -> float:
        now = next(times)
        if now == 10.0:  # the link has nothing to do, and begins to wait
            engine.say(StopTrace())
        return now

    monkeypatch.setattr(engine_link.time, "monotonic", clock)
    assert isinstance(link.receive(), StopTrace)
    assert link.take_idle() == 3.0
    engine.say(StopTrace())
    assert link._socket.poll()
    assert isinstance(link.receive(), StopTrace)
    assert link.take_idle() == 0.0


def test_what_is_readable_beside_the_engine_wakes(ends: tuple[EngineSide, EngineLink]) -> None:
    engine, link = ends
    link.send(ClockPing(1))
    engine.hear()
    bell = os.eventfd(0)
    try:
        engine.say(StopTrace())
        assert isinstance(link.receive([bell]), StopTrace)
        os.eventfd_write(bell, 1)
        assert link.receive([bell]) is None
    finally:
        os.close(bell)
