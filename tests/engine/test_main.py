# SPDX-License-Identifier: Apache-2.0
"""The engine process's loop, run in a thread of this process, with sockets as frontends have them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from harness import VOCAB_SIZE, expected_tokens, make_request

from pagoda.engine.core import EngineCore
from pagoda.engine.main import EngineProcess
from pagoda.ipc.rundir import ENGINE_SOCKET, socket_address
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import (
    AbortRequests,
    EngineMessage,
    EngineReady,
    FrontendMessage,
    GenerateRequest,
    Hello,
    LoadQuery,
    Shutdown,
    TokenChunks,
)
from pagoda.messages.load import LoadReport
from pagoda.messages.worker_config import WorkerConfig

TIMEOUT_MS = 60_000


class Frontend:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._socket.connect(socket_address(directory, ENGINE_SOCKET))
        self.tokens: dict[str, list[int]] = {}
        self.send(Hello())
        assert isinstance(self.receive(), EngineReady)

    def send(self, *messages: FrontendMessage) -> None:
        for message in messages:
            self._socket.send(msgspec.msgpack.encode(message))

    def send_frame(self, payload: bytes) -> None:
        self._socket.send(payload)

    def receive(self) -> EngineMessage:
        while True:
            message = msgspec.msgpack.decode(self._socket.recv(), type=EngineMessage)
            if not isinstance(message, LoadReport) or message.query_id is not None:
                return message

    def answer(self, request: GenerateRequest, aborted: str = "") -> list[int]:
        """Tokens of a request, until it has ended; some of `aborted` may have been sampled before the abort."""
        tokens: list[int] = []
        while True:
            message = self.receive()
            assert isinstance(message, TokenChunks)
            for chunk in message.chunks:
                if chunk.request_id == aborted:
                    continue
                assert chunk.request_id == request.request_id
                assert chunk.error is None
                tokens += chunk.token_ids
                if chunk.finish_reason is not None:
                    return tokens

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def make_frontend(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[type[Frontend]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sim = SimConfig(vocab_size=VOCAB_SIZE, **getattr(request, "param", {}))
    config = EngineConfig(worker=WorkerConfig(model="sim"), executor="sim", sim=sim)
    engine = EngineProcess(config, tmp_path, context)
    thread = threading.Thread(target=engine.run)
    thread.start()
    frontends: list[Frontend] = []

    def make() -> Frontend:
        frontends.append(Frontend(context, tmp_path))
        return frontends[-1]

    yield make  # type: ignore[misc]
    assert thread.is_alive()
    frontends[0].send(Shutdown())
    thread.join()
    for frontend in frontends:
        frontend.close()
    context.term()


def test_a_second_request_of_the_same_id_leaves_the_first_untouched(
    make_frontend: type[Frontend],
) -> None:
    frontend = make_frontend()  # type: ignore[call-arg]
    request = make_request("a", [1, 2, 3], max_tokens=30)
    frontend.send(request, request)
    assert frontend.answer(request) == expected_tokens(request)
    frontend.send(request)  # the id is free again
    assert frontend.answer(request) == expected_tokens(request)


def test_what_is_no_message_ends_nothing(make_frontend: type[Frontend]) -> None:
    frontend = make_frontend()  # type: ignore[call-arg]
    request = make_request("a", [1, 2, 3], max_tokens=30)
    for payload in (b"", b"garbage", msgspec.msgpack.encode({"type": "x"})):
        frontend.send_frame(payload)
    frontend.send(request)
    assert frontend.answer(request) == expected_tokens(request)


def test_requests_of_one_id_are_told_apart_by_their_wire_ids(make_frontend: type[Frontend]) -> None:
    frontend = make_frontend()  # type: ignore[call-arg]
    gone, asked = (
        msgspec.structs.replace(make_request("a", [number], max_tokens=30), wire_id=f"w{number}")
        for number in (1, 2)
    )
    frontend.send(gone, AbortRequests(["w1"]), asked)
    answered = msgspec.structs.replace(asked, request_id="w2")
    assert frontend.answer(answered, aborted="w1") == expected_tokens(asked)


def test_frontends_may_choose_the_same_id(make_frontend: type[Frontend]) -> None:
    first, second = make_frontend(), make_frontend()  # type: ignore[call-arg]
    requests = [make_request("a", [1, 2, 3], max_tokens=30), make_request("a", [4], max_tokens=20)]
    first.send(requests[0])
    second.send(requests[1])
    assert first.answer(requests[0]) == expected_tokens(requests[0])
    assert second.answer(requests[1]) == expected_tokens(requests[1])


@pytest.mark.parametrize("make_frontend", [{"base_s": 1e6}], indirect=True)
def test_queries_are_answered_while_a_step_takes_long(make_frontend: type[Frontend]) -> None:
    first, second = make_frontend(), make_frontend()  # type: ignore[call-arg]
    first.send(make_request("a", [1]), LoadQuery(1))
    second.send(AbortRequests(["a"]), LoadQuery(2))  # the request is not its own
    for frontend, query_id in ((first, 1), (second, 2)):
        report = frontend.receive()
        assert isinstance(report, LoadReport)
        assert report.query_id == query_id
        assert report.num_running + report.num_waiting == 1


def test_answers_go_on_between_long_prompts_that_come_at_once(
    make_frontend: type[Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of the loop take so many bytes of messages, and leave none behind."""
    monkeypatch.setattr("pagoda.engine.main.MAX_TURN_BYTES", 1)
    frontend = make_frontend()
    events: list[str] = []
    are_sent = threading.Event()
    add, end_turn = EngineCore.add, EngineCore.drain_refusals

    def noting_add(core: EngineCore, request: GenerateRequest) -> object:
        events.append("add")
        return add(core, request)

    def noting_end(core: EngineCore) -> object:
        if events:
            are_sent.wait(60)
            events.append("end")
        return end_turn(core)

    monkeypatch.setattr(EngineCore, "add", noting_add)
    monkeypatch.setattr(EngineCore, "drain_refusals", noting_end)
    requests = [make_request(f"r{i}", [1, 2, 3], max_tokens=2) for i in range(8)]
    frontend.send(*requests)
    are_sent.set()
    ended = 0
    while ended < len(requests):
        message = frontend.receive()
        assert isinstance(message, TokenChunks)
        ended += sum(chunk.finish_reason is not None for chunk in message.chunks)
    adds = [index for index, event in enumerate(events) if event == "add"]
    assert len(adds) == len(requests)
    assert all(events[index + 1] == "end" for index in adds)
