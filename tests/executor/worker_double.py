"""A worker process without torch, for tests: it answers plans and misbehaves when the model's name says so.

`fails` does it on every rank, `fails@1` on rank 1 of the replica only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import zmq

from pagoda.engine.messages import (
    KVDirectory,
    SimConfig,
    Transfer,
    TransferEnd,
    WorkerConfig,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
)
from pagoda.executor.sim import SimExecutor, SimWorker
from pagoda.ipc.clock import MonotonicClock
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.worker.engine_link import EngineLink
from pagoda.worker.transfer_link import TransferThread


class Copies:
    """A worker's half of the tiers that copies nothing, and says so at once."""

    def __init__(self, behaviour: str, on_end: Callable[[], None]) -> None:
        self._behaviour = behaviour
        self._on_end = on_end
        self._ends: list[TransferEnd] = []

    def start(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            end = TransferEnd(transfer.transfer_id, transfer.generation)
            match self._behaviour:
                case "never-copies":
                    continue
                case "copies-badly":
                    end = TransferEnd(end.transfer_id, end.generation, [1], "its disk is broken")
                case "copies-twice":
                    self._ends += [TransferEnd(end.transfer_id, end.generation - 1), end]
                    self._ends.append(TransferEnd(end.transfer_id + 1000, end.generation))
            self._ends.append(end)
        self._on_end()

    def step_done(self, step: int) -> None:
        pass

    def poll(self) -> list[TransferEnd]:
        ends, self._ends = self._ends, []
        return ends

    def close(self) -> None:
        pass


def main() -> None:
    hold_lifeline()
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    parallel, place = config.parallel, config.place
    rank = parallel.rank_in_replica(place)
    behaviour, _, of_rank = config.model.partition("@")
    if of_rank not in ("", str(rank)):
        behaviour = "obeys"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = EngineLink(context, sys.argv[1], config)
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
    if config.has_kv_tiers:
        place_on_disk = KVDirectory(f"/rank/{rank}", 4096 * (1 + rank))
        ready = msgspec.structs.replace(
            ready, kv_host_slots=9 - rank, kv_directories=(place_on_disk,)
        )
        if behaviour != "has-no-link":
            TransferThread(context, sys.argv[1], config, partial(Copies, behaviour))
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
