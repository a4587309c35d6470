"""A worker process without torch, for tests: it answers plans and misbehaves when the model's name says so."""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec
import zmq

from pagoda.engine.messages import (
    SimConfig,
    StepPlan,
    WorkerConfig,
    WorkerFailed,
    WorkerMessage,
)
from pagoda.executor.sim import SimExecutor, SimWorker
from pagoda.ipc.clock import MonotonicClock
from pagoda.ipc.codec import Codec
from pagoda.ipc.lifeline import hold_lifeline


def main() -> None:
    hold_lifeline()
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt_string(zmq.IDENTITY, str(config.parallel.rank_in_replica(config.place)))
    socket.connect(sys.argv[1])
    encode = Codec[WorkerMessage](WorkerMessage).encode
    if config.model == "fails":
        socket.send(encode(WorkerFailed("No such model.", True)))
        time.sleep(60)
    sim = SimConfig(num_blocks=config.num_blocks or 64)
    starter = SimExecutor(sim, clock=MonotonicClock())
    starter.start()
    worker = SimWorker(sim, check_kv=True)
    (ready,) = starter.poll()
    socket.send(encode(ready))
    decode = Codec[StepPlan](StepPlan).decode
    while True:
        plan = decode(socket.recv())
        if config.model == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.model == "hangs":
            time.sleep(60)
        socket.send(encode(worker.execute(plan, 0.0)))


if __name__ == "__main__":
    main()
