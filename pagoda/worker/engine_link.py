# SPDX-License-Identifier: Apache-2.0
"""A worker's end of the engine's socket."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from pagoda.faults.injector import Faults
from pagoda.ipc.addresses import allow_ipv6
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client
from pagoda.ipc.door import pieces
from pagoda.messages.adapters import LoadAdapter, UnloadAdapter
from pagoda.messages.tracing import ClockPing, ClockPong, StartTrace, StopTrace
from pagoda.messages.worker import (
    KVSize,
    StepPlan,
    TokenMasks,
    WorkerHello,
    WorkerMessage,
    WorkerOrder,
    WorkerPeers,
    WorkerProgress,
    WorkerRoom,
)
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.clocks import ClockComparison
from pagoda.telemetry.tracer import Tracer, TraceSession

_PROGRESS_S = 1.0
_FAREWELL_MS = 5000
"""Milliseconds that a last message may wait for the engine to fetch it."""
_PONG_MS = 1000
"""An engine that does not tell its time within this is not asked again: steps are more important."""

_AnswerT = TypeVar("_AnswerT", WorkerPeers, KVSize)

Order = StepPlan | StartTrace | StopTrace | LoadAdapter | UnloadAdapter


class EngineLink:
    """The engine tells the workers of a replica apart by their ranks."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        config: WorkerConfig,
        faults: Faults | None = None,
    ) -> None:
        """`faults` are those of this process."""
        rank = config.parallel.rank_in_replica(config.place)
        self._socket = connect(context, address, config, str(rank))
        faults = faults or Faults(None)
        self._transmit = faults.messages("worker.result", self._send_payload)
        self._encode = Codec[WorkerMessage](WorkerMessage).encode
        self._decode = Codec[WorkerOrder](WorkerOrder).decode
        self._next_progress_at = 0.0
        self._is_between_hosts = config.curve is not None
        self._idle_s = 0.0
        """Seconds that `receive` has waited since `take_idle`."""
        self._kept: deque[Order] = deque()
        """Orders that came while the clocks were compared, or masks were awaited."""
        self._masks: dict[int, TokenMasks] = {}
        """Masks that came before a step awaits them, by step."""
        self.report_progress()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: WorkerMessage) -> None:
        self._transmit(self._encode(message))

    def _send_payload(self, payload: bytes) -> None:
        self._socket.send_multipart(pieces(payload))

    def report_progress(self) -> None:
        """Tells the engine that the worker, which is starting, does not hang; at most once in `_PROGRESS_S`."""
        now = time.monotonic()
        if now >= self._next_progress_at:
            self._next_progress_at = now + _PROGRESS_S
            self.send(WorkerProgress())

    def meet_peers(self, hello: WorkerHello) -> WorkerPeers:
        """Waits until all workers of the replica have said hello."""
        self.send(hello)
        return self._answer(WorkerPeers)

    def agree_on_kv(self, num_blocks: int) -> int:
        """Says for how many KV blocks this worker has room; waits for the size that all workers take."""
        self.send(WorkerRoom(num_blocks))
        return self._answer(KVSize).num_blocks

    def _answer(self, kind: type[_AnswerT]) -> _AnswerT:
        """The answer to what a worker that starts has sent."""
        while True:
            answer = msgspec.msgpack.decode(self._socket.recv(), type=kind | ClockPong)
            if isinstance(answer, kind):  # a late pong may stand before it
                return answer

    def receive(self, pollables: Sequence[object] = ()) -> Order | None:
        """Returns the next order; None when one of `pollables` (as `zmq_poll` takes them) is readable first."""
        if self._kept:
            return self._kept.popleft()
        while True:
            if pollables:
                sources: list[Any] = [self._socket, *pollables]
                began = time.monotonic()
                readable = zmq.zmq_poll([(source, zmq.POLLIN) for source in sources])
                self._idle_s += time.monotonic() - began
                if self._socket not in dict(readable):
                    return None
            order = self._order(self._decode(self._receive()))
            if order is not None:
                return order

    def _order(self, message: WorkerOrder) -> Order | None:
        """The message, if it is an order; masks are kept for their steps, and late pongs forgotten."""
        if isinstance(message, TokenMasks):
            self._masks[message.step] = message
        elif not isinstance(message, ClockPong):
            return message
        return None

    def _keep(self, message: WorkerOrder) -> None:
        """Keeps a message that came while another one is awaited."""
        order = self._order(message)
        if order is not None:
            self._kept.append(order)

    def _receive(self) -> bytes:
        """The next message; waiting for it counts as idle."""
        if self._socket.get(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator, arg-type]
            return self._socket.recv()
        began = time.monotonic()
        message = self._socket.recv()
        self._idle_s += time.monotonic() - began
        return message

    def take_idle(self) -> float:
        """Seconds that `receive` has waited since this was asked last."""
        idle, self._idle_s = self._idle_s, 0.0
        return idle

    def await_masks(self, step: int) -> TokenMasks:
        """Waits for the masks of a step; the engine's end ends this process meanwhile."""
        while step not in self._masks:
            self._keep(self._decode(self._socket.recv()))
        masks = self._masks[step]
        # Masks of earlier steps were of slots that have failed.
        self._masks = {later: found for later, found in self._masks.items() if later > step}
        return masks

    def start_trace(self, tracer: Tracer, session: TraceSession) -> None:
        tracer.start(session)
        if self._is_between_hosts:
            self.compare_clocks(tracer)

    def compare_clocks(self, tracer: Tracer) -> None:
        """Measures how far the engine's clock is ahead, for the trace."""
        comparison = ClockComparison(tracer.clock_ns)
        while (number := comparison.next_ping()) is not None:
            self.send(ClockPing(number))
            if not self._hear_pong(comparison):
                break
        comparison.note(tracer)

    def _hear_pong(self, comparison: ClockComparison) -> bool:
        while self._socket.poll(_PONG_MS):
            order: WorkerOrder = self._decode(self._socket.recv())
            if not isinstance(order, ClockPong):
                self._keep(order)
            elif comparison.pong(order.number, order.uid, order.now_ns):
                return True
        return False


def connect(
    context: zmq.Context[zmq.Socket[bytes]], address: str, config: WorkerConfig, identity: str
) -> zmq.Socket[bytes]:
    """A socket to the engine, which tells those of all workers apart by their identities."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, _FAREWELL_MS)
    socket.setsockopt_string(zmq.IDENTITY, identity)
    if config.curve is not None:
        encrypt_client(socket, config.curve)
    allow_ipv6(socket, address)
    socket.connect(address)
    return socket
