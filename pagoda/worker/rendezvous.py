"""Rendezvous of the ranks of one replica: each says hello, and connects to the addresses of the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import zmq

from pagoda.ipc.curve import start_authenticator
from pagoda.messages.worker import WorkerHello, WorkerPeers
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.collectives import Collectives
from pagoda.parallel.config import RankPlace
from pagoda.worker.stages import StageInput, StageOutput

if TYPE_CHECKING:
    from pagoda.worker.group import GroupEndpoint

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class Rendezvous:
    """One rank's side of it. Must live as long as the worker: peers may join later than this rank."""

    def __init__(
        self,
        config: WorkerConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`address` is the engine's: beside it lie the sockets of the stages, where it is a path."""
        self._config = config
        self._context = context
        parallel, place = config.parallel, config.place
        if config.curve is not None:
            start_authenticator(context, config.curve)
        self.source: StageInput | None = None
        if place.pp > 0:
            own = f"{address}-{parallel.rank_in_replica(place)}"
            if config.curve is not None:
                own = f"tcp://{config.bind_host}:*"
            self.source = StageInput(
                context, own, config.curve, hidden_size=hidden_size, dtype=dtype
            )
        self._endpoint: GroupEndpoint | None = None
        if parallel.tensor_parallel_size > 1 and place.tp == 0:
            from pagoda.worker.group import GroupEndpoint

            self._endpoint = GroupEndpoint(config.bind_host, parallel.tensor_parallel_size)

    def hello(self, num_blocks: int) -> WorkerHello:
        endpoint = self._endpoint
        return WorkerHello(
            host=host_identity(self._config.bind_host),
            stage_address=self.source.address if self.source is not None else "",
            group_address=endpoint.address if endpoint is not None else "",
            shared_memory=endpoint.shared_memory if endpoint is not None else "",
            num_blocks=num_blocks,
        )

    def form_group(self, peers: WorkerPeers) -> Collectives | None:
        """The tensor-parallel ranks of this stage, for which it waits; None where there is one only."""
        place, size = self._config.place, self._config.parallel.tensor_parallel_size
        if size == 1:
            return None
        from pagoda.worker.group import form_group

        members = [self._hello_of(peers, RankPlace(place.dp, place.pp, tp)) for tp in range(size)]
        return form_group(place.tp, members, self._config.bind_host, self._endpoint)

    def target(self, peers: WorkerPeers) -> StageOutput | None:
        """The rank of the same number one stage on; None on the last stage."""
        place, num_stages = self._config.place, self._config.parallel.pipeline_parallel_size
        if place.pp == num_stages - 1:
            return None
        successor = self._hello_of(peers, RankPlace(place.dp, place.pp + 1, place.tp))
        return StageOutput(self._context, successor.stage_address, self._config.curve)

    def _hello_of(self, peers: WorkerPeers, place: RankPlace) -> WorkerHello:
        return peers.hellos[self._config.parallel.rank_in_replica(place)]


def host_identity(bind_host: str) -> str:
    """The same for processes that can share memory: they see each other under /proc, and have one address."""
    namespace = os.stat(_PID_NAMESPACE).st_ino
    return f"{_BOOT_ID.read_text(encoding='ascii').strip()}/{namespace}/{bind_host}"
