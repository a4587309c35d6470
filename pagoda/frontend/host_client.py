"""The router's end of the connection to one host, which the router sees as a `Replica`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import zmq

from pagoda.errors import ConfigError, EngineDeadError, EngineLostError
from pagoda.frontend.endpoint import ReplicaState, StepListener, Unsubscribe
from pagoda.frontend.engine_connection import EngineConnection
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client
from pagoda.ipc.event_socket import EventSocket, host_socket
from pagoda.messages.frontend import (
    EngineFailed,
    EngineReady,
    Hello,
    TokenChunks,
)
from pagoda.messages.hosts import HostLeave, HostMessage, RouterMessage
from pagoda.messages.tracing import ClockPing, ClockPong, TraceStopped
from pagoda.messages.worker_config import CurveKeys
from pagoda.telemetry.tracer import Tracer

HELLO_TIMEOUT_S = 10.0
HANG_TIMEOUT_S = 30.0
"""Seconds of silence after which a host that owes an answer counts as lost. Heartbeats of the socket
(`pagoda.ipc.event_socket`) notice a dead host or a cut line, but go on when the host's event loop hangs."""


@dataclass(frozen=True)
class Identity:
    id: str
    """New at each start."""
    model: str
    model_digest: str
    is_router: bool


class HostClient:
    """One host. A host that is lost stays lost; a host that comes back gets another `HostClient`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: CurveKeys,
        router: Identity,
        tracer: Tracer | None = None,
        *,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        hang_timeout_s: float = HANG_TIMEOUT_S,
    ) -> None:
        """`address` is `tcp://host:port`; `router` and `tracer` are those of this process.

        Raises:
            zmq.ZMQError: there is no socket left.
        """
        self.address = address
        self.name = address.removeprefix("tcp://")
        self.is_leaving = False
        """The host has said that it takes no new requests."""
        self._tracer = tracer or Tracer("router")
        self._router = router
        self._hello_timeout_s = hello_timeout_s
        self._encode = Codec[RouterMessage](RouterMessage).encode
        self._decode = Codec[HostMessage](HostMessage).decode
        socket = host_socket(context, zmq.DEALER)
        encrypt_client(socket, keys)
        # The system notices at once when a process has gone; a cut line shows by missing heartbeats.
        self._socket = EventSocket(socket, self._receive, lambda: self.lose("hung up"))
        self.connection = connection = EngineConnection(
            f"the host at {address}",
            self._send,
            self._tracer.clock_ns,
            hang_timeout_s=hang_timeout_s,
            on_hang=lambda: self.lose(f"did not answer for {hang_timeout_s:g} s"),
        )
        self.watch = connection.watch
        self.generate = connection.generate
        self.abort = connection.abort
        self.load = connection.load
        self.health = connection.health
        self.drain = connection.drain
        self.subscribe_cache = connection.subscribe_cache
        self.wait_failed = connection.wait_failed

    @property
    def limits(self) -> EngineReady:
        return self.connection.limits

    @property
    def state(self) -> ReplicaState:
        return self.connection.state

    async def start(self) -> None:
        """Returns when the host has said what its limits are.

        Raises:
            EngineDeadError: the host does not answer.
            ConfigError: the host refuses this router; says why.
        """
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError:
            raise ConfigError(f"{self.address!r} is not an address like tcp://HOST:PORT.") from None
        self._send(Hello(model=self._router.model, model_digest=self._router.model_digest))
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                await self.connection.wait_open()
        except TimeoutError:
            raise EngineDeadError(
                f"The host at {self.address} does not answer; it is not there, or has another "
                "--cluster-key-file, or a firewall is in between."
            ) from None
        except EngineLostError as loss:
            raise EngineDeadError(
                f"{str(loss).removesuffix('.')} before it said anything; it has another "
                "--cluster-key-file, or is no host."
            ) from None

    def subscribe_steps(self, listener: StepListener) -> Unsubscribe:
        """Does nothing: each host shows its own steps, and a router may have thousands of hosts."""
        del listener
        return lambda: None

    def lose(self, reason: str) -> None:
        """Gives the host up: its requests continue at other hosts. `reason` is a clause. May be called twice."""
        self.connection.fail(EngineLostError(f"The host at {self.address} {reason}."))

    async def close(self) -> None:
        self.lose("was let go")
        self._socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        if self.connection.has_failed:
            return
        began = self._tracer.e2e()
        try:
            message = self._decode(b"".join(frames))
        except msgspec.DecodeError as error:
            self.lose(f"sent what is not a message ({error})")
            return
        match message:
            case HostLeave():
                self.is_leaving = True
                self.connection.notify()
            case ClockPing(number):
                self._send(ClockPong(number, self._tracer.process.uid, self._tracer.clock_ns()))
            case EngineFailed(reason):
                self.connection.fail(ConfigError(reason))
            case TraceStopped():
                pass  # hosts are not asked to trace
            case _:
                self.connection.receive(message)
        if began and isinstance(message, TokenChunks):
            self._tracer.span("chunks", began, {"chunks": len(message.chunks)})

    def _send(self, message: RouterMessage) -> None:
        self._socket.send(self._encode(message))
