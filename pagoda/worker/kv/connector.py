"""Fetches KV from workers of other engines, beside the steps: straight into the blocks where it belongs.

Each rank of a peer has a thread of its own that reads what is wanted of it, transfer by transfer; so peers, and
ranks of one peer, never wait for each other. A transfer has ended when all ranks that it needs have been read, or
given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pagoda.messages.transfers import (
    DeviceBlocks,
    KVPeer,
    KVRank,
    RemoteBlocks,
    Transfer,
    TransferEnd,
)
from pagoda.pd.transport.base import BATCH_BYTES, BATCH_LIMIT_S, MemoryLink, TransportError
from pagoda.worker.kv.plan import OwnPart, PlanError, Slice, find_runs, make_spans, plan_slices
from pagoda.worker.kv.steps import Steps

Connect = Callable[[KVRank, float], MemoryLink]
"""A link to one rank of a peer, by the best transport that works, before a deadline. Raises TransportError."""

_PAUSE_S = 1.0
"""Seconds for which a rank that could not be reached is not tried again."""
_FAREWELL_S = 5.0

_log = logging.getLogger(__name__)


class KVConnectorWorker:
    """The fetching half of the handoff, a `TransferWorker`. `on_end` is called from any thread."""

    def __init__(
        self,
        parts: Sequence[OwnPart],
        own_rank: int,
        connect: Connect,
        on_end: Callable[[], None],
    ) -> None:
        """`parts` are this rank's KV tensors; `own_rank` is its number in the replica."""
        self._parts = parts
        self._own_rank = own_rank
        self.connect = connect
        self._on_end = on_end
        self._steps = Steps()
        self._lock = threading.Lock()
        self._ends: deque[TransferEnd] = deque()
        """Guarded by the lock."""
        self.peers: dict[str, _Peer] = {}
        """All but the ends belong to the thread that calls."""

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
                peer.close()

    def _plan(self, peer: KVPeer) -> _Peer:
        try:
            slices = plan_slices(self._parts, self._own_rank, peer)
        except PlanError as error:
            _log.error("KV of %s cannot be used: %s", peer.peer_id, error)
            return _Peer([], str(error), 0)
        lanes = [
            _Lane(f"{peer.peer_id}/{rank}", peer.ranks[rank], parts, self.connect, self._steps)
            for rank, parts in slices.items()
        ]
        num_blocks = min(peer.ranks[rank].num_blocks for rank in slices)
        return _Peer(lanes, "", num_blocks)

    def start(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._begin(transfer)

    def _begin(self, transfer: Transfer) -> None:
        match transfer.source, transfer.target:
            case RemoteBlocks(peer_id, sources), DeviceBlocks(targets):
                if len(sources) != len(targets):
                    raise ValueError(
                        f"Transfer {transfer.transfer_id} has a source unlike its target."
                    )
            case _:
                raise ValueError(
                    f"Transfer {transfer.transfer_id} is between places that are not here."
                )
        peer = self.peers.get(peer_id)
        problem = "nobody knows that peer" if peer is None else peer.problem(sources)
        self._check_targets(transfer, targets)
        lanes = [] if peer is None or problem else peer.lanes
        job = _Job(transfer, sources, targets, len(lanes), self._end)
        if not lanes or not sources:
            job.end_at_once(problem)
            return
        for lane in lanes:
            lane.put(job)

    def _check_targets(self, transfer: Transfer, targets: Sequence[int]) -> None:
        num_blocks = self._parts[0].num_blocks
        if any(not 0 <= block_id < num_blocks for block_id in targets):
            raise ValueError(f"Transfer {transfer.transfer_id} writes to blocks that are not here.")

    def _end(self, end: TransferEnd) -> None:
        with self._lock:
            self._ends.append(end)
        self._on_end()

    def step_done(self, step: int) -> None:
        self._steps.done(step)

    def poll(self) -> list[TransferEnd]:
        with self._lock:
            ended = list(self._ends)
            self._ends.clear()
        return ended

    def close(self) -> None:
        """Ends the threads; reads under way fail."""
        self._steps.close()
        for peer in self.peers.values():
            peer.close()
        for peer in self.peers.values():
            peer.join()
        self.peers.clear()


class _Peer:
    """The ranks of another engine that have what this rank needs."""

    def __init__(self, lanes: list[_Lane], misfit: str, num_blocks: int) -> None:
        self.lanes = lanes
        self._misfit = misfit
        self._num_blocks = num_blocks

    def problem(self, block_ids: Sequence[int]) -> str:
        """Reason why these blocks cannot be read; empty if they can."""
        if self._misfit:
            return self._misfit
        if any(not 0 <= block_id < self._num_blocks for block_id in block_ids):
            return f"the peer has {self._num_blocks} blocks, and not all of these"
        return ""

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()

    def join(self) -> None:
        for lane in self.lanes:
            lane.join()


class _Job:
    def __init__(
        self,
        transfer: Transfer,
        sources: Sequence[int],
        targets: Sequence[int],
        num_lanes: int,
        on_end: Callable[[TransferEnd], None],
    ) -> None:
        self.transfer = transfer
        self.sources = sources
        self.targets = targets
        self._num_left = num_lanes
        self._on_end = on_end
        self._lock = threading.Lock()
        self._num_good = len(sources)
        """Leading blocks that every lane has read so far, or may still read."""
        self._error = ""

    def lane_done(self, num_good: int, error: str) -> None:
        """One lane touches the blocks no more; it has read so many leading ones."""
        with self._lock:
            if num_good < self._num_good:
                self._num_good, self._error = num_good, error
            self._num_left -= 1
            if self._num_left > 0:
                return
        self._tell()

    def end_at_once(self, problem: str) -> None:
        """Nothing is to be read, or nothing can be."""
        if problem:
            self._num_good, self._error = 0, problem
        self._tell()

    def _tell(self) -> None:
        failed = list(range(self._num_good, len(self.sources)))
        error = self._error if failed else ""
        transfer = self.transfer
        self._on_end(TransferEnd(transfer.transfer_id, transfer.generation, failed, error))


class _Lane:
    """Reads from one rank, in a thread that lives from the first transfer until the peer parts."""

    def __init__(
        self, name: str, rank: KVRank, slices: list[Slice], connect: Connect, steps: Steps
    ) -> None:
        self._name = name
        self._rank = rank
        self._slices = slices
        self._batch_blocks = max(1, BATCH_BYTES // sum(piece.num_bytes for piece in slices))
        self.connect = connect
        self._steps = steps
        self.link: MemoryLink | None = None
        """Belongs to the thread, but may be closed by others while it reads."""
        self._refused = ""
        self._retry_at = 0.0
        """Time until which the rank counts as unreachable, for the reason `_refused`."""
        self._state = threading.Condition()
        """Guards all that follows."""
        self._jobs: deque[_Job] = deque()
        self._is_reading = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, job: _Job) -> None:
        with self._state:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"kv-fetch {self._name}", daemon=True
                )
                self._thread.start()
            self._state.notify_all()

    def close(self) -> None:
        """Fails running transfers, and ends the thread."""
        with self._state:
            self._is_closed = True
            link = self.link if self._is_reading else None  # an idle one is closed by the thread
            self._state.notify_all()
        self._steps.wake()
        if link is not None:
            link.close()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(_FAREWELL_S)

    # ---- the thread

    def _run(self) -> None:
        for job in self._take_jobs():
            num_good, error = 0, ""
            try:
                if not self._steps.wait_for(job.transfer.after_step, lambda: self._is_closed):
                    raise TransportError("the worker is ending, or the peer has parted")
                for start in range(0, len(job.sources), self._batch_blocks):
                    end = start + self._batch_blocks
                    deadline = time.monotonic() + BATCH_LIMIT_S
                    self.read(job.sources[start:end], job.targets[start:end], deadline)
                    num_good = min(end, len(job.sources))
            except TransportError as problem:
                error = str(problem)
            except Exception as problem:
                _log.exception("KV of %s could not be read", self._name)
                self._disconnect()
                error = f"{type(problem).__name__}: {problem}"
            job.lane_done(num_good, error)
        self._disconnect()

    def _take_jobs(self) -> Iterator[_Job]:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            yield job

    def read(self, sources: Sequence[int], targets: Sequence[int], deadline: float) -> None:
        spans = make_spans(self._slices, find_runs(sources, targets))
        was_connected = self.link is not None
        try:
            with self._reading(deadline) as link:
                link.read(spans, deadline)
        except TransportError as error:
            self._disconnect()
            if not was_connected or self._is_closed:
                raise
            # It may have been cut while nobody used it; whether anybody is there, a new one tells.
            _log.info("connecting to %s again: %s", self._name, error)
            self.read(sources, targets, deadline)

    @contextmanager
    def _reading(self, deadline: float) -> Iterator[MemoryLink]:
        """The link, which is closed when the peer parts meanwhile."""
        link = self._linked(deadline)
        with self._state:
            if self._is_closed:
                raise TransportError("the peer has parted")
            self._is_reading = True
        try:
            yield link
        finally:
            with self._state:
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
