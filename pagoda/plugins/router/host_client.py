# SPDX-License-Identifier: Apache-2.0
"""The router's end of the connection to one host: the `ReplicaTransport` of a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from pagoda.errors import ConfigError, EngineDeadError, EngineLostError
from pagoda.fleet.answer_check import PeerError
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.replica import Replica
from pagoda.ipc.codec import Codec
from pagoda.ipc.door import pieces
from pagoda.messages.frontend import EngineFailed, Hello, HostPool, HostWork, PoolModel
from pagoda.messages.tracing import ClockPing, ClockPong, FragmentPart, HostTraceStopped, StartTrace
from pagoda.plugins.router.host_sockets import HostSockets
from pagoda.plugins.router.host_traces import FetchedTrace
from pagoda.plugins.router.messages import HostMessage, HostPong, RouterMessage
from pagoda.plugins.router.round_trips import RoundTrips
from pagoda.telemetry.tracer import Tracer

HELLO_TIMEOUT_S = 10.0
Weigh = Callable[[HostPool, float], int]
"""Gives the tokens of waiting that the place of a host is worth, and so many seconds of a round trip."""
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
    pool: str = ""
    """The pool of routers that a host belongs to; empty leaves the choice to its model."""
    pools: tuple[PoolModel, ...] = ()
    """The pools of a router; empty if it has one, of its `model`."""
    region: str = ""
    price: float = 0.0
    number: int = 0
    """Number of a router's pool, as which it is one of the hosts of a router above."""

    @property
    def host_id(self) -> str:
        """The id by which routers know a host, or one pool of a router below."""
        return f"{self.id}-{self.number}" if self.number else self.id

    @property
    def offered(self) -> tuple[PoolModel, ...]:
        return self.pools or (PoolModel("", self.model, self.model_digest),)


class HostClient:
    """One host. A host that is lost stays lost; a host that comes back gets another `HostClient`."""

    def __init__(
        self,
        sockets: HostSockets,
        address: str,
        router: Identity,
        tracer: Tracer | None = None,
        *,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        weigh: Weigh = lambda _place, _round_trip_s: 0,
    ) -> None:
        """`address` is `tcp://host:port`; `router` and `tracer` are those of this process; `weigh` gives the
        tokens of waiting that the host's place is worth (`Replica.handicap`).

        Raises zmq.ZMQError if there is no socket left.
        """
        self._address = address
        self._router = router
        self._tracer = tracer or Tracer("router")
        self._hello_timeout_s = hello_timeout_s
        self._trace: FetchedTrace | None = None
        self._has_spoken = False
        self.welcome = HostPool("")
        """The router's pool that the host has named, and its place."""
        self.round_trip_s: float | None = None
        """The shortest of the latest round trips; None before the first."""
        self._weigh = weigh
        self._pings = RoundTrips(self.send)
        self._encode = Codec[RouterMessage](RouterMessage).encode
        self._decode = Codec[HostMessage](HostMessage).decode
        self._socket = sockets.client(self._receive, lambda: self._lose("hung up"))
        self.replica = Replica(
            self,
            f"the host at {address}",
            self._tracer,
            name=address.removeprefix("tcp://"),
            hang_timeout_s=hang_timeout_s,
            on_hang=lambda: self._lose(f"did not answer for {hang_timeout_s:g} s"),
        )

    async def start(self) -> None:
        """Returns when the host has said what its limits are.

        Raises EngineDeadError if the host does not answer, ConfigError, with the host's reason, if the host
        refuses this router.
        """
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError:
            raise ConfigError(
                f"{self._address!r} is not an address like tcp://HOST:PORT."
            ) from None
        self.send(Hello(pools=self._router.offered))
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                await self.replica.wait_open()
        except TimeoutError:
            raise EngineDeadError(
                f"The host at {self._address} does not answer; it is not there, or has another "
                "--cluster-key-file, or a firewall is in between."
            ) from None
        except EngineLostError as loss:
            if self._has_spoken:
                raise EngineDeadError(str(loss)) from None
            raise EngineDeadError(
                f"{str(loss).removesuffix('.')} before it said anything; it has another "
                "--cluster-key-file, or is no host."
            ) from None

    async def close(self) -> None:
        self._lose("was let go")
        self._socket.close()

    def start_trace(self, order: StartTrace) -> FetchedTrace:
        """The host traces from now on, until the trace returned is stopped."""
        self._trace = FetchedTrace(self.send, f"the host at {self._address}", order)
        return self._trace

    def send(self, message: RouterMessage) -> None:
        self._socket.send(*pieces(self._encode(message)))

    def _lose(self, reason: str) -> None:
        """Gives the host up: its requests continue at other hosts. `reason` is a clause. May be called twice."""
        if self._trace is not None:
            self._trace.lose(reason)
        self._pings.stop()
        self.replica.fail(EngineLostError(f"The host at {self._address} {reason}."))

    def _receive(self, frames: list[bytes]) -> None:
        if self.replica.state is ReplicaState.FAILED:
            return
        self._has_spoken = True
        try:
            message = self._decode(b"".join(frames))
        except msgspec.DecodeError as error:
            self._lose(f"sent what is not a message ({error})")
            return
        match message:
            case ClockPing(number):
                self.send(ClockPong(number, self._tracer.process.uid, self._tracer.clock_ns()))
            case HostTraceStopped() | FragmentPart():
                if self._trace is not None:
                    self._trace.receive(message)
            case HostPool():
                self.welcome = message
                self._pings.start()
            case HostPong(number):
                self.round_trip_s = self._pings.pong(number)
                self.replica.set_handicap(self._weigh(self.welcome, self.round_trip_s))
            case HostWork(pending_tokens):
                self.replica.take_work_of_others(pending_tokens)
            case EngineFailed(reason):
                self.replica.fail(ConfigError(reason))
            case _:
                try:
                    self.replica.receive(message)
                except PeerError as error:
                    self._lose(str(error))
