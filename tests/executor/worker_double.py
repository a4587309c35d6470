# SPDX-License-Identifier: Apache-2.0
"""A worker process without torch, for tests: it answers plans and misbehaves when the model's name says so.

`fails` does it on every rank, `fails@1` on rank 1 of the replica only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from pagoda.ipc.clock import MonotonicClock
from pagoda.ipc.curve import encrypt_client
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.messages.engine_config import SimConfig
from pagoda.messages.tracing import StartTrace, StopTrace, TraceStopped
from pagoda.messages.transfers import (
    KVPart,
    KVRank,
    RemoteBlocks,
    TierPlace,
    Transfer,
    TransferEnd,
    TransferLink,
    Transfers,
)
from pagoda.messages.worker import PROTOCOL_VERSION, WorkerFailed, WorkerHello, WorkerReady
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.sim.executor import SimExecutor, SimWorker
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.engine_link import EngineLink


def main() -> None:
    hold_lifeline()
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    parallel, place = config.parallel, config.place
    rank = parallel.rank_in_replica(place)
    tracer = Tracer(f"worker rank {rank}")
    behaviour, _, of_rank = config.model.partition("@")
    if of_rank not in ("", str(rank)):
        behaviour = "obeys"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = EngineLink(context, sys.argv[1], config)
    if config.trace is not None:
        engine.start_trace(tracer, config.trace)
    if behaviour == "fails":
        engine.send(WorkerFailed("No such model.", True))
        time.sleep(60)
    if behaviour == "newer" and parallel.replica_size > 1:
        engine.send(WorkerHello(host="", protocol_version=PROTOCOL_VERSION + 1))
    if behaviour == "says-nothing":
        time.sleep(60)
    num_blocks = config.kept_blocks or config.num_blocks or 64 - rank
    if behaviour == "leaves":
        engine.send(WorkerHello(host=""))
        engine.close()
        context.term()
        Path(os.environ["LEFT"]).touch()
        time.sleep(60)
    if parallel.replica_size > 1:
        peers = engine.meet_peers(WorkerHello(host=""))
        if len(peers.hellos) != parallel.replica_size:
            raise ValueError(f"{len(peers.hellos)} of {parallel.replica_size} peers.")
    if behaviour == "hangs-loading":
        engine.report_progress()
        time.sleep(60)
    if behaviour == "breaks":
        engine.send(WorkerFailed("RuntimeError: broken", False))
        sys.exit(1)
    if parallel.replica_size > 1:
        num_blocks = engine.agree_on_kv(num_blocks)
    sim = SimConfig(num_blocks=num_blocks, block_size=32 if behaviour == "differs" else 16)
    ready = _ready(sim)
    if behaviour == "newer":
        ready = msgspec.structs.replace(ready, protocol_version=PROTOCOL_VERSION + 1)
    if behaviour == "rounds":
        ready = msgspec.structs.replace(ready, arithmetic="other bits")
    if config.has_transfer_link:
        ready = _with_tiers(ready, config, rank, behaviour)
        threading.Thread(target=_copy, args=(context, config, rank, behaviour), daemon=True).start()
    engine.send(ready)
    worker = SimWorker(sim, check_kv=True, num_stages=parallel.pipeline_parallel_size)
    while True:
        order = engine.receive()
        match order:
            case StartTrace(session):
                engine.start_trace(tracer, session)
                continue
            case StopTrace():
                tracer.stop()
                engine.send(TraceStopped([f"rank {rank} has a word to say."]))
                continue
        if behaviour == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == "hangs-up":
            engine.close()
            time.sleep(60)
        if behaviour == "hangs":
            time.sleep(60)
        result = worker.execute(order, 0.0)
        if place == parallel.sampling_place(place.dp):
            engine.send(result)


def _ready(sim: SimConfig) -> WorkerReady:
    starter = SimExecutor(sim, clock=MonotonicClock())
    starter.start()
    (ready,) = starter.poll()
    if not isinstance(ready, WorkerReady):
        raise TypeError(f"The simulated worker says {ready}.")
    return ready


def _with_tiers(ready: WorkerReady, config: WorkerConfig, rank: int, behaviour: str) -> WorkerReady:
    return msgspec.structs.replace(
        ready,
        kv_host_slots=16 - rank if config.kv_host_bytes else 0,
        kv_places=tuple(
            TierPlace(name, f"{tier.path}/rank{rank}", 4096 + rank)
            for name, tier in config.kv_tiers.items()
        ),
        kv_ranks=(kv_rank(rank),) if config.kv_handoff else (),
        kv_digest="other KV" if behaviour == "means-other" else "KV",
    )


def kv_rank(rank: int) -> KVRank:
    """What the worker says of its KV."""
    part = KVPart(layer=rank, kind="keys", first_head=0, num_heads=1, head_bytes=64)
    return KVRank(parts=(part,), num_blocks=64, descriptors={"tcp": str(rank).encode()})


def _copy(
    context: zmq.Context[zmq.Socket[bytes]], config: WorkerConfig, rank: int, behaviour: str
) -> None:
    """Ends transfers on the second connection, as soon as they have begun, or as `behaviour` says."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt_string(zmq.IDENTITY, f"kv-{rank}")
    if config.curve is not None:
        encrypt_client(socket, config.curve)
    socket.connect(sys.argv[1])
    socket.send(msgspec.msgpack.encode(TransferLink()))
    held_back: list[TransferEnd] = []
    known: set[str] = set()
    while True:
        message = msgspec.msgpack.decode(socket.recv(), type=Transfers)
        if behaviour == "dies-copying":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "hangs-up-copying":
            socket.close(linger=0)
            return
        known |= {peer.peer_id for peer in message.added_peers}
        ends = [_end(transfer, known) for transfer in message.transfers]
        known -= set(message.removed_peers)
        if behaviour == "fails-copying":
            # Of each transfer the block with its rank's number, and the last one.
            lost = sorted({rank, 3})
            ends = [
                TransferEnd(end.transfer_id, end.generation, lost, f"rank {rank} has no room")
                for end in ends
            ]
        if behaviour == "ends-twice":
            ends = [end for end in ends for _ in range(2)]
        if behaviour == "ends-what-nobody-began":
            ends = [TransferEnd(ends[0].transfer_id, ends[0].generation + 1), *ends]
        if behaviour == "ends-late":
            # With the next message.
            ends, held_back = held_back, ends
        if behaviour == "never-ends":
            ends = []
        for end in ends:
            socket.send(msgspec.msgpack.encode(end))


def _end(transfer: Transfer, known: set[str]) -> TransferEnd:
    match transfer.source:
        case RemoteBlocks(peer_id, block_ids) if peer_id not in known:
            lost = list(range(len(block_ids)))
            return TransferEnd(transfer.transfer_id, transfer.generation, lost, "who is that?")
    return TransferEnd(transfer.transfer_id, transfer.generation)


if __name__ == "__main__":
    main()
