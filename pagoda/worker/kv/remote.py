# SPDX-License-Identifier: Apache-2.0
"""The seam for KV in the memory of other workers: what a plugin of `pagoda.kv_connectors` gives a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pagoda.faults.injector import Faults
from pagoda.messages.transfers import KVPeer, RemoteBlocks, Transfer
from pagoda.messages.worker import WorkerReady
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.loading import LoadedWorker
from pagoda.worker.memory_plan import WorkerMemoryPlan


class Fetcher(Protocol):
    """Reads blocks of peers. All methods belong to the thread that calls `start`."""

    def add_peers(self, peers: Sequence[KVPeer]) -> None:
        """Transfers may name these."""

    def remove_peers(self, peer_ids: Sequence[str]) -> None:
        """Forgets peers; running transfers from them fail."""

    def start(self, transfer: Transfer, remote: RemoteBlocks, targets: Sequence[int]) -> None:
        """Begins to read `remote`, blocks of a peer, into `targets`, blocks on the device.

        Raises ValueError if the engine names blocks that this worker does not have.
        """

    def close(self) -> None:
        """Ends the threads; reads under way fail."""


class RemoteMemory(Protocol):
    """The memory that one rank exports, and its way to the memory of others."""

    @property
    def group_bytes(self) -> Sequence[int]:
        """Bytes of this rank's parts of a block, by KV group."""

    def described(self, ready: WorkerReady) -> WorkerReady:
        """Adds what the engine tells other engines to `ready`."""

    def open_fetcher(self, jobs: Jobs) -> Fetcher | None:
        """Ready to start the threads that fetch, whose transfers end in `jobs`; None where nothing is fetched."""

    def close(self) -> None:
        """Ends exports: reads of others that have not ended fail."""


OpenRemoteMemory = Callable[[WorkerMemoryPlan, LoadedWorker, Faults | None], RemoteMemory]
"""Opens what a configuration with `kv_handoff` asks for; the faults are those of this process.
Raises ConfigError: no transport works here."""
