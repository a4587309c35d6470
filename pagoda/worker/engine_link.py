"""A worker's end of the engine's socket."""

from __future__ import annotations

import msgspec
import zmq

from pagoda.engine.messages import (
    StepPlan,
    WorkerConfig,
    WorkerHello,
    WorkerMessage,
    WorkerPeers,
)
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client

_FAREWELL_MS = 5000
"""How long a last message may wait for the engine to fetch it."""


class EngineLink:
    """The engine tells the workers of a replica apart by their ranks."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, config: WorkerConfig
    ) -> None:
        rank = config.parallel.rank_in_replica(config.place)
        self._socket = connect(context, address, config, str(rank))
        self._encode = Codec[WorkerMessage](WorkerMessage).encode
        self._decode_plan = Codec[StepPlan](StepPlan).decode

    def close(self) -> None:
        self._socket.close()

    def send(self, message: WorkerMessage) -> None:
        self._socket.send(self._encode(message))

    def meet_peers(self, hello: WorkerHello) -> WorkerPeers:
        """Waits until all workers of the replica have said hello."""
        self.send(hello)
        return msgspec.msgpack.decode(self._socket.recv(), type=WorkerPeers)

    def receive_plan(self) -> StepPlan:
        plan: StepPlan = self._decode_plan(self._socket.recv())
        return plan


def connect(
    context: zmq.Context[zmq.Socket[bytes]], address: str, config: WorkerConfig, identity: str
) -> zmq.Socket[bytes]:
    """A socket to the engine, which tells those of all workers apart by their identities."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, _FAREWELL_MS)
    socket.setsockopt_string(zmq.IDENTITY, identity)
    if config.curve is not None:
        encrypt_client(socket, config.curve)
    socket.connect(address)
    return socket
