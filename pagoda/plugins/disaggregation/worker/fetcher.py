# SPDX-License-Identifier: Apache-2.0
"""Fetches KV from workers of other engines into the blocks where it belongs.

Each rank of a peer has a thread of its own, so peers, and ranks of one peer, never wait for each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

from pagoda.backend.kv_store import DeviceEvent
from pagoda.errors import TransportError
from pagoda.messages.transfers import (
    BATCH_BYTES,
    BATCH_LIMIT_S,
    KVPeer,
    KVRank,
    RemoteBlocks,
    Transfer,
)
from pagoda.plugins.disaggregation.transport.base import MemoryLink
from pagoda.plugins.disaggregation.worker.landing import OpenLanding, Wanted
from pagoda.plugins.disaggregation.worker.plan import (
    OwnPart,
    PlanError,
    Slice,
    find_runs,
    plan_slices,
)
from pagoda.worker.kv.jobs import Job, Jobs, Lane

Connect = Callable[[KVRank, float], MemoryLink]
"""A link to one rank of a peer, by the best transport that works, before a deadline. Raises TransportError."""

_PAUSE_S = 1.0
"""Seconds for which a rank that could not be reached is not tried again."""

_Fetch = tuple[Job, int, Sequence[int], Sequence[int]]
"""A job, the KV group of its blocks, those there and those here."""

_log = logging.getLogger(__name__)


class KVFetcher:
    """The fetching half of the handoff. All methods belong to the thread that calls `start`."""

    def __init__(
        self,
        parts: Sequence[OwnPart],
        own_rank: int,
        connect: Connect,
        open_landing: OpenLanding,
        jobs: Jobs,
    ) -> None:
        """`parts` are this rank's KV tensors; `own_rank` is its number in the replica."""
        self._parts = parts
        self._open_landing = open_landing
        self._own_rank = own_rank
        self.connect = connect
        self._jobs = jobs
        self.peers: dict[str, _Peer] = {}

    def add_peers(self, peers: Sequence[KVPeer]) -> None:
        """Transfers may name these."""
        for peer in peers:
            if peer.peer_id not in self.peers:
                self.peers[peer.peer_id] = self._plan(peer)

    def remove_peers(self, peer_ids: Sequence[str]) -> None:
        """Forgets peers; running transfers from them fail."""
        for peer_id in peer_ids:
            peer = self.peers.pop(peer_id, None)
            if peer is not None:
                for reader in peer.readers:
                    reader.close()

    def _plan(self, peer: KVPeer) -> _Peer:
        try:
            pools = [
                plan_slices(self._parts, self._own_rank, peer, pool)
                for pool in range(1 + max((rank.pool for rank in peer.ranks), default=0))
            ]
        except PlanError as error:
            _log.error("KV of %s cannot be used: %s", peer.peer_id, error)
            return _Peer([], 0, str(error))
        readers = [
            [self._reader(peer, rank, parts) for rank, parts in slices.items()] for slices in pools
        ]
        num_blocks = min(peer.ranks[rank].num_blocks for slices in pools for rank in slices)
        return _Peer(readers, num_blocks)

    def _reader(self, peer: KVPeer, rank: int, parts: list[Slice]) -> _RankReader:
        name, kv_rank = f"{peer.peer_id}/{rank}", peer.ranks[rank]
        return _RankReader(name, kv_rank, parts, self.connect, self._open_landing, self._jobs)

    def start(self, transfer: Transfer, remote: RemoteBlocks, targets: Sequence[int]) -> None:
        """Begins to read `remote`, blocks of a peer, all of one pool, into `targets`, blocks on the device.

        Raises ValueError if the engine names blocks that this worker does not have.
        """
        if any(not 0 <= block_id < self._parts[0].num_blocks for block_id in targets):
            raise ValueError(f"Transfer {transfer.transfer_id} writes to blocks that are not here.")
        peer, sources = self.peers.get(remote.peer_id, _UNKNOWN_PEER), remote.block_ids
        pool = sources[0] // peer.num_blocks if sources and peer.num_blocks else 0
        sources = [block_id - pool * peer.num_blocks for block_id in sources]
        if any(not 0 <= block_id < peer.num_blocks for block_id in sources) or (
            sources and not 0 <= pool < len(peer.pools)
        ):
            problem = (
                peer.misfit
                or f"the peer's pools have {peer.num_blocks} blocks, and not all of these"
            )
            self._jobs.end_part(self._jobs.begin(transfer, 1), range(len(sources)), problem)
            return
        readers = [it for it in peer.pools[pool] if it.has(remote.group)] if sources else []
        job = self._jobs.begin(transfer, len(readers))
        for reader in readers:
            reader.tasks.put((job, remote.group, sources, targets))

    def close(self) -> None:
        """Ends the threads; reads under way fail."""
        readers = [reader for peer in self.peers.values() for reader in peer.readers]
        for reader in readers:
            reader.close()
        for reader in readers:
            reader.tasks.join()
        self.peers.clear()


class _Peer(NamedTuple):
    """The ranks of another engine that have what this rank needs."""

    pools: list[list[_RankReader]]
    """Readers of the ranks of each pool."""
    num_blocks: int
    """Blocks of each."""
    misfit: str = ""
    """Clause that says why no block can be read, if that is so."""

    @property
    def readers(self) -> list[_RankReader]:
        return list(chain.from_iterable(self.pools))


_UNKNOWN_PEER = _Peer([], 0, "nobody knows that peer")


class _RankReader:
    """Reads from one rank of a peer, in a thread that lives until the peer parts."""

    def __init__(
        self,
        name: str,
        rank: KVRank,
        slices: list[Slice],
        connect: Connect,
        open_landing: OpenLanding,
        jobs: Jobs,
    ) -> None:
        self._name = name
        self._rank = rank
        self._slices = {
            piece.group: [it for it in slices if it.group == piece.group] for piece in slices
        }
        self.connect = connect
        self._landing = open_landing()
        self._jobs = jobs
        self.link: MemoryLink | None = None
        """Belongs to the thread, but may be closed by others while it reads."""
        self._refused = ""
        self._retry_at = 0.0
        """Time until which the rank counts as unreachable, for the reason `_refused`."""
        self._is_reading = False
        """Guarded like the jobs, and `_is_closed` too."""
        self._is_closed = False
        self.tasks = Lane(f"kv-fetch {name}", 1, self._run)

    def has(self, group: int) -> bool:
        """True if there is something to read of a KV group."""
        return group in self._slices

    def _batch_blocks(self, group: int) -> int:
        """Blocks of a group that are read at a time."""
        return max(1, BATCH_BYTES // sum(piece.num_bytes for piece in self._slices[group]))

    def close(self) -> None:
        """Fails running transfers, and ends the thread."""
        with self._jobs.changed:
            self._is_closed = True
            link = self.link if self._is_reading else None  # an idle one is closed by the thread
            self._jobs.changed.notify_all()
        self.tasks.end()
        if link is not None:
            link.close()

    # ---- the thread

    def _run(self, fetches: Iterator[_Fetch]) -> None:
        for job, group, sources, targets in fetches:
            num_good, error, count = 0, "", self._batch_blocks(group)
            try:
                unused = self._jobs.wait_for_step(job.transfer.after_step, lambda: self._is_closed)
                if unused is None:
                    raise TransportError("the worker is ending, or the peer has parted")
                for start in range(0, len(sources), count):
                    end = start + count
                    deadline = time.monotonic() + BATCH_LIMIT_S
                    self.read(group, sources[start:end], targets[start:end], unused, deadline)
                    num_good = min(end, len(sources))
            except TransportError as problem:
                error = str(problem)
            except Exception as problem:
                _log.exception("KV of %s could not be read", self._name)
                self._disconnect()
                error = f"{type(problem).__name__}: {problem}"
            self._jobs.end_part(job, range(num_good, len(sources)), error)
        self._disconnect()

    def read(
        self,
        group: int,
        sources: Sequence[int],
        targets: Sequence[int],
        unused: DeviceEvent,
        deadline: float,
    ) -> None:
        """Reads blocks into targets, which no step uses behind the event."""
        wanted = Wanted(self._slices[group], find_runs(sources, targets), unused)
        was_connected = self.link is not None
        try:
            with self._reading(deadline) as link:
                self._landing.read(link, wanted, deadline)
        except TransportError as error:
            self._disconnect()
            if not was_connected or self._is_closed:
                raise
            # It may have been cut while nobody used it; whether anybody is there, a new one tells.
            _log.info("connecting to %s again: %s", self._name, error)
            self.read(group, sources, targets, unused, deadline)

    @contextmanager
    def _reading(self, deadline: float) -> Iterator[MemoryLink]:
        """The link, which is closed when the peer parts meanwhile."""
        link = self._linked(deadline)
        with self._jobs.changed:
            if self._is_closed:
                raise TransportError("the peer has parted")
            self._is_reading = True
        try:
            yield link
        finally:
            with self._jobs.changed:
                self._is_reading = False

    def _linked(self, deadline: float) -> MemoryLink:
        if self.link is not None:
            return self.link
        if self._is_closed:
            raise TransportError("the peer has parted")
        if time.monotonic() < self._retry_at:
            raise TransportError(self._refused)
        try:
            link = self.link = self.connect(self._rank, deadline)
        except TransportError as error:
            self._refused, self._retry_at = str(error), time.monotonic() + _PAUSE_S
            raise
        return link

    def _disconnect(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()
