# SPDX-License-Identifier: Apache-2.0
"""What a host says to a router, besides tokens, and what it does with what it hears. Over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from fragment_files import read_fragments
from linked_hosts import KEYS, Host, until
from scripted_endpoint import ScriptedEndpoint
from virtual_fleet import engine_config, request

from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import SharedEndpoint
from pagoda.fleet.policies import POLICIES
from pagoda.ipc.curve import encrypt_client
from pagoda.messages.frontend import (
    AbortRequests,
    FinishReason,
    FrontendMessage,
    RequestRefused,
    SubscribeCache,
    TokenChunk,
    TokenChunks,
    UnsubscribeCache,
    Work,
)
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.spans import embedded_span
from pagoda.plugins.router.messages import HostMessage
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession


async def test_a_router_sees_how_far_a_prompt_is() -> None:
    config = engine_config(max_num_batched_tokens=32)
    asked = request("r", range(100), max_tokens=2)
    host = Dispatcher([SimEngine(config).replica], POLICIES["round-robin"])
    await host.start()
    async with Host(host) as door:
        router = Dispatcher([], POLICIES["round-robin"])
        router.add((await door.dial()).replica)
        seen = [
            (chunk.num_computed_tokens, next(iter(router.slots)).work.pending_tokens)
            async for chunk in router.generate(asked)
            if chunk.is_news
        ]
        assert seen == [(32, 68 + 2), (64, 36 + 2), (96, 4 + 2)]
        assert [slot.work.pending_tokens for slot in router.slots] == [0]
        await router.close()
    await host.close()


class Door(Host):
    """A host, and a router's socket at it that says whatever a test wants."""

    def __init__(self, endpoint: SharedEndpoint) -> None:
        super().__init__(endpoint)
        self.socket = self.connect()

    def connect(self) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Socket(self.context, zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        encrypt_client(socket, KEYS)
        socket.connect(self.record.address)
        return socket

    async def say(self, message: FrontendMessage) -> None:
        await self.socket.send(msgspec.msgpack.encode(message))

    async def last_chunk(self, socket: zmq.asyncio.Socket | None = None) -> TokenChunk:
        """Of the request that ends next."""
        socket = socket or self.socket
        async with asyncio.timeout(20):
            while True:
                said = msgspec.msgpack.decode(await socket.recv(), type=HostMessage)
                for chunk in said.chunks if isinstance(said, TokenChunks) else ():
                    if chunk.finish_reason is not None:
                        return chunk

    async def close(self) -> None:
        self.socket.close()
        await super().close()


async def test_a_request_with_which_the_host_fails_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = ScriptedEndpoint("ok")
    async with Door(endpoint) as door:
        endpoint.raises = RuntimeError("nobody has thought of this")
        await door.say(request("r"))
        chunk = await door.last_chunk()
        assert chunk.finish_reason is FinishReason.ERROR
        assert chunk.error == "The host failed with this request; its log says why."
        assert "nobody has thought of this" in caplog.text


async def test_a_message_of_more_frames_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with Door(ScriptedEndpoint("ok")) as door:
        await door.socket.send_multipart([b"one", b"two"])
        await door.say(request("r"))
        assert (await door.last_chunk()).finish_reason is FinishReason.LENGTH
        assert "a router sent what is not a message" in caplog.text


async def test_an_id_may_be_used_again_at_once_when_its_request_was_aborted() -> None:
    endpoint = ScriptedEndpoint("ok")
    endpoint.pause_after = 0
    async with Door(endpoint) as door:
        await door.say(request("r", wire_id="1"))
        await endpoint.paused.wait()
        endpoint.pause_after = None
        # The host reads both in one turn: the first request has not ended when the second one begins.
        door.socket.send(msgspec.msgpack.encode(AbortRequests(["1"])))
        await door.say(request("r", wire_id="2"))
        chunk = await door.last_chunk()
        assert (chunk.request_id, chunk.finish_reason) == ("2", FinishReason.LENGTH)
        assert endpoint.aborted == ["r"]
        await until(lambda: door.door.num_requests == 0)


async def test_routers_may_have_the_same_request_also_one_that_has_connected_anew() -> None:
    """The host need not have noticed that the router's first connection is no more."""
    config = engine_config(max_num_seqs=8)
    engine = Dispatcher([SimEngine(config).replica], POLICIES["round-robin"])
    await engine.start()
    asked = request("r", max_tokens=100, wire_id="7")
    async with Door(engine) as door:
        await door.say(asked)
        await until(lambda: door.door.num_requests == 1)
        first, door.socket = door.socket, door.connect()
        await door.say(asked)
        both = [await door.last_chunk(), await door.last_chunk(first)]
        assert [(chunk.request_id, chunk.error) for chunk in both] == [("7", None)] * 2
        first.close()
    await engine.close()


async def test_a_wire_id_that_is_taken_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = ScriptedEndpoint("ok")
    endpoint.pause_after = 0
    async with Door(endpoint) as door:
        for name in ("first", "second"):
            await door.say(request(name, wire_id="1"))
        await until(lambda: "a second request with this wire id" in caplog.text)
        endpoint.go_on.set()
        assert (await door.last_chunk()).finish_reason is FinishReason.LENGTH
        assert [asked.request_id for asked in endpoint.requests] == ["first"]


async def test_what_a_router_wanted_ends_when_it_hangs_up() -> None:
    endpoint = ScriptedEndpoint("ok")
    endpoint.pause_after = 0
    async with Door(endpoint) as door:
        await door.say(SubscribeCache())
        await door.say(request("r"))
        await endpoint.paused.wait()
        assert door.door.num_subscriptions == 1
        await door.say(UnsubscribeCache())
        await until(lambda: door.door.num_subscriptions == 0)
        await door.say(SubscribeCache())
        await until(lambda: door.door.num_subscriptions == 1)
        door.socket.close()
        await until(lambda: endpoint.aborted == ["r"])
        assert door.door.num_subscriptions == 0


# ---- traces


async def test_a_host_that_traces_knows_the_time_of_its_routers(tmp_path: Path) -> None:
    tracer, asleep = Tracer("frontend"), Tracer("router")
    session = TraceSession(level=TraceLevel.E2E, directory=str(tmp_path), run="host")
    async with Host(ScriptedEndpoint(), tracer=tracer) as host:
        before = await host.dial(asleep)
        tracer.start(session)
        host.door.compare_clocks()
        await until_clocks(tmp_path, 1)
        after = await host.dial(asleep)  # a router that comes later is asked as well
        await until_clocks(tmp_path, 2)
        await before.close()
        await after.close()
    tracer.stop()
    (fragment,) = read_fragments(tmp_path)
    assert {clock["peer"] for clock in fragment.clocks} == {asleep.process.uid}
    for clock in fragment.clocks:
        assert abs(clock["offset_ns"]) <= clock["round_trip_ns"] / 2 + 1


async def until_clocks(directory: Path, count: int) -> None:
    async with asyncio.timeout(20):
        while [len(it.clocks) for it in read_fragments(directory)] != [count]:
            await asyncio.sleep(0.01)


async def test_a_router_writes_when_tokens_come(tmp_path: Path) -> None:
    tracer = Tracer("router")
    tracer.start(TraceSession(level=TraceLevel.E2E, directory=str(tmp_path), run="router"))
    async with Host(ScriptedEndpoint("abc")) as host:
        remote = await host.dial(tracer)
        assert [chunk async for chunk in remote.replica.generate(request("r", [1], max_tokens=3))]
        await remote.close()
    tracer.stop()
    (fragment,) = read_fragments(tmp_path)
    assert sum(event["args"]["chunks"] for event in fragment.named("chunks")) == 3


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"prompt_token_ids": [512]}, "prompt_token_ids takes token ids below"),
        ({"output_token_ids": [2**31 - 1]}, "output_token_ids takes token ids below"),
        ({"eos_token_ids": (999,)}, "eos_token_ids takes token ids below"),
        ({"never": (512,)}, "never takes token ids below"),
        (
            {"spans": (embedded_span(0, 99, bytes(4 * 99)),)},
            "embedded spans must lie in the prompt",
        ),
        ({"spans": (embedded_span(0, 1, bytes(8)),)}, "1 vectors of 0 float32, got 8 bytes"),
        ({"prompt_token_ids": []}, "1 to 256 tokens"),
        ({"prompt_token_ids": [1] * 257}, "1 to 256 tokens"),
        ({"sampling": SamplingParams(logit_bias={512: 1.0})}, "logit_bias takes token ids below"),
        ({"sampling": SamplingParams(logit_bias={5: 1e9})}, "logit_bias must be in"),
        ({"sampling": SamplingParams(temperature=-1.0)}, "temperature must be in"),
        ({"sampling": SamplingParams(allowed_token_ids=())}, "allowed_token_ids must name"),
    ],
)
async def test_what_no_frontend_would_send_is_refused_before_the_engine(
    wrong: dict[str, Any], reason: str
) -> None:
    endpoint = ScriptedEndpoint("ok")
    async with Door(endpoint) as door:
        asked = request("r")
        wrong = dict(wrong)
        own = {name: wrong.pop(name) for name in Work.__struct_fields__ if name in wrong}
        work = msgspec.structs.replace(asked.work, **own)
        await door.say(msgspec.structs.replace(asked, work=work, **wrong))
        said = msgspec.msgpack.decode(await door.socket.recv(), type=HostMessage)
        assert isinstance(said, RequestRefused)
        assert reason in said.error
        assert endpoint.requests == []
        await door.say(request("s"))
        assert (await door.last_chunk()).finish_reason is FinishReason.LENGTH
