"""A worker process without torch, for tests: it answers plans and misbehaves when the model's name says so.

`fails` does it on every rank, `fails@1` on rank 1 of the replica only.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec
import zmq

from pagoda.engine.messages import SimConfig, WorkerConfig, WorkerFailed, WorkerHello, WorkerReady
from pagoda.executor.sim import SimExecutor, SimWorker
from pagoda.ipc.clock import MonotonicClock
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.worker.engine_link import EngineLink


def main() -> None:
    hold_lifeline()
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    parallel, place = config.parallel, config.place
    rank = parallel.rank_in_replica(place)
    behaviour, _, of_rank = config.model.partition("@")
    if of_rank not in ("", str(rank)):
        behaviour = "obeys"
    engine = EngineLink(zmq.Context(), sys.argv[1], config)
    if behaviour == "fails":
        engine.send(WorkerFailed("No such model.", True))
        time.sleep(60)
    if behaviour == "says-nothing":
        time.sleep(60)
    num_blocks = config.num_blocks or 64 - rank
    if behaviour == "leaves":
        engine.send(WorkerHello(host="", num_blocks=num_blocks))
        engine.close()
        time.sleep(60)
    if parallel.replica_size > 1:
        peers = engine.meet_peers(WorkerHello(host="", num_blocks=num_blocks))
        if len(peers.hellos) != parallel.replica_size:
            raise ValueError(f"{len(peers.hellos)} of {parallel.replica_size} peers.")
        num_blocks = peers.num_blocks
    if behaviour == "breaks":
        engine.send(WorkerFailed("RuntimeError: broken", False))
        sys.exit(1)
    sim = SimConfig(num_blocks=num_blocks, block_size=32 if behaviour == "differs" else 16)
    ready = _ready(sim)
    if behaviour == "rounds":
        ready = msgspec.structs.replace(ready, arithmetic="other bits")
    engine.send(ready)
    worker = SimWorker(sim, check_kv=True, num_stages=parallel.pipeline_parallel_size)
    while True:
        plan = engine.receive_plan()
        if behaviour == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "hangs-up":
            engine.close()
            time.sleep(60)
        if behaviour == "hangs":
            time.sleep(60)
        result = worker.execute(plan, 0.0)
        if place == parallel.sampling_place(place.dp):
            engine.send(result)


def _ready(sim: SimConfig) -> WorkerReady:
    starter = SimExecutor(sim, clock=MonotonicClock())
    starter.start()
    (ready,) = starter.poll()
    if not isinstance(ready, WorkerReady):
        raise TypeError(f"The simulated worker says {ready}.")
    return ready


if __name__ == "__main__":
    main()
