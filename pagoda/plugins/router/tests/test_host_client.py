# SPDX-License-Identifier: Apache-2.0
"""A router's connection to one host, over real sockets; the host is a socket that a test answers at."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq.asyncio
from linked_hosts import KEYS, Closing
from scripted_endpoint import LIMITS
from virtual_fleet import request

from pagoda.errors import ConfigError, EngineDeadError, EngineLostError
from pagoda.fleet.endpoint import ReplicaState
from pagoda.ipc.curve import encrypt_server, start_authenticator
from pagoda.messages.frontend import EngineFailed
from pagoda.plugins.router.host_client import HostClient, Identity
from pagoda.plugins.router.host_sockets import CurveSockets
from pagoda.plugins.router.messages import HostMessage

ROUTER = Identity("router", "m", "digest", is_router=True)


class Host(Closing):
    """The other end of a `HostClient`."""

    def __init__(self, **options: float) -> None:
        self.context = zmq.Context()
        start_authenticator(self.context, KEYS)
        self.socket = zmq.asyncio.Socket(self.context, zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        encrypt_server(self.socket, KEYS)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.client = HostClient(CurveSockets(self.context, KEYS), self.address, ROUTER, **options)

    async def answer(self, payload: HostMessage | bytes) -> None:
        """Answers the next message of the router."""
        router, _ = await self.socket.recv_multipart()
        if not isinstance(payload, bytes):
            payload = msgspec.msgpack.encode(payload)
        await self.socket.send_multipart([router, payload])

    async def close(self) -> None:
        await self.client.close()
        self.socket.close()
        self.context.term()


async def test_a_host_that_hangs_is_lost_though_its_sockets_answer_heartbeats() -> None:
    async with Host(hang_timeout_s=0.4) as peer:
        await asyncio.gather(peer.client.start(), peer.answer(LIMITS))
        stream = peer.client.replica.generate(request("r"))
        with pytest.raises(EngineLostError, match=r"host at .* did not answer for 0.4 s"):
            await anext(stream)
        assert peer.client.replica.state is ReplicaState.FAILED
        assert "did not answer" in str(await peer.client.replica.wait_failed())


async def test_a_host_that_does_not_say_hello_is_given_up() -> None:
    async with Host(hello_timeout_s=0.05) as peer:
        with pytest.raises(EngineDeadError, match="does not answer; it is not there"):
            await peer.client.start()


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (EngineFailed("Another model.", is_user_error=True), ConfigError, "Another model"),
        (b"nonsense", EngineDeadError, "sent what is not a message"),
    ],
)
async def test_a_host_that_refuses_or_sends_nonsense_is_given_up(
    answer: HostMessage | bytes, error: type[Exception], reason: str
) -> None:
    async with Host() as peer:
        with pytest.raises(error, match=reason):
            await asyncio.gather(peer.client.start(), peer.answer(answer))
