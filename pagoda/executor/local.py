"""Workers as child processes on this host."""

from __future__ import annotations

import contextlib

import msgspec
import zmq

from pagoda.engine.messages import StepPlan, StepResult, WorkerConfig, WorkerFailed, WorkerMessage
from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.ipc.clock import Clock
from pagoda.ipc.codec import Codec
from pagoda.ipc.lifeline import ChildProcess

WORKER_MODULE = "pagoda.worker.main"


class LocalExecutor:
    """One worker process, reached through a ZeroMQ pair socket.

    Every start uses a new socket, so nothing of a lost worker can be mistaken for its successor's.
    """

    max_in_flight = 2

    def __init__(
        self,
        config: WorkerConfig,
        *,
        socket_prefix: str,
        step_timeout_s: float,
        clock: Clock,
        module: str = WORKER_MODULE,
    ) -> None:
        """`socket_prefix` is a ZeroMQ address in a private directory; a number is appended per start.

        `module` is run as the worker.
        """
        self._config = config
        self._socket_prefix = socket_prefix
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._module = module
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encode = Codec[StepPlan](StepPlan).encode
        self._decode = Codec[WorkerMessage](WorkerMessage).decode
        self._num_starts = 0
        self._worker: _Worker | None = None

    def start(self, num_blocks: int | None = None) -> None:
        self._num_starts += 1
        if num_blocks is not None:
            self._config = msgspec.structs.replace(self._config, num_blocks=num_blocks)
        address = f"{self._socket_prefix}-{self._num_starts}"
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        child = ChildProcess(self._module, [address], config=msgspec.msgpack.encode(self._config))
        self._worker = _Worker(child, socket)

    @property
    def worker_pid(self) -> int | None:
        return self._worker.child.pid if self._worker else None

    def submit(self, plan: StepPlan) -> None:
        worker = self._worker
        if worker is None:
            raise RuntimeError("A plan was submitted without a worker.")
        worker.socket.send(self._encode(plan))
        worker.num_in_flight += 1
        if worker.num_in_flight == 1:
            worker.deadline = self._clock.now() + self._step_timeout_s

    def poll(self) -> list[ExecutorEvent]:
        worker = self._worker
        if worker is None:
            return []
        alive = (
            worker.child.is_alive()
        )  # before the socket is read: a last message is not overlooked
        events: list[ExecutorEvent] = []
        for message in self._receive(worker):
            if isinstance(message, WorkerFailed):
                events.append(self._lose(message.error, message.is_user_error))
                return events
            events.append(message)
            if isinstance(message, StepResult):
                worker.num_in_flight -= 1
                worker.deadline = (
                    self._clock.now() + self._step_timeout_s if worker.num_in_flight else None
                )
        if not alive:
            events.append(self._lose(f"the worker {worker.child.describe_end()}"))
        elif worker.deadline is not None and self._clock.now() >= worker.deadline:
            events.append(self._lose(f"a step took longer than {self._step_timeout_s:g} s"))
        return events

    def _receive(self, worker: _Worker) -> list[WorkerMessage]:
        messages: list[WorkerMessage] = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(self._decode(worker.socket.recv(zmq.NOBLOCK)))
        return messages

    def _lose(self, reason: str, is_user_error: bool = False) -> WorkerLost:
        self._drop_worker()
        return WorkerLost(reason, is_user_error)

    def pollables(self) -> list[object]:
        return [self._worker.socket, self._worker.child] if self._worker else []

    def next_event_at(self) -> float | None:
        return self._worker.deadline if self._worker else None

    def close(self) -> None:
        self._drop_worker()
        self._context.term()

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.socket.close()
            self._worker.child.kill()
            self._worker = None


class _Worker:
    """One incarnation of the worker."""

    def __init__(self, child: ChildProcess, socket: zmq.Socket[bytes]) -> None:
        self.child = child
        self.socket = socket
        self.num_in_flight = 0
        self.deadline: float | None = None
        """When the step that is being executed has taken too long; None when there is none."""
