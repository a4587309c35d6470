"""Transfers of a replica: every rank copies its part, and a transfer has ended when all have."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.engine.messages import DiskObjects, Transfer, TransferEnd


class _Open:
    """A transfer under way."""

    def __init__(self, transfer: Transfer, num_ranks: int) -> None:
        self.generation = transfer.generation
        self.on_disk = isinstance(transfer.source, DiskObjects) or isinstance(
            transfer.target, DiskObjects
        )
        self.waiting_for = set(range(num_ranks))
        self.failed: set[int] = set()
        self.error = ""


class _Work:
    """What one rank has to do with its disk, or without."""

    def __init__(self) -> None:
        self.num_open = 0
        self.moved_at = 0.0
        """When the last of it ended, or the first of it began."""


class GroupTransfers:
    """What the ranks of one start still have to do. Ends that it does not wait for change nothing."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._open: dict[int, _Open] = {}
        """By id."""
        self._work = {
            (rank, on_disk): _Work() for rank in range(num_ranks) for on_disk in (False, True)
        }

    def begin(self, transfers: Sequence[Transfer], now: float) -> None:
        for transfer in transfers:
            entry = _Open(transfer, self._num_ranks)
            self._open[transfer.transfer_id] = entry
            for rank in entry.waiting_for:
                work = self._work[rank, entry.on_disk]
                if work.num_open == 0:
                    work.moved_at = now
                work.num_open += 1

    def end(self, rank: int, end: TransferEnd, now: float) -> TransferEnd | None:
        """One rank has ended its part; returns what is to be said of all, once the last one has."""
        entry = self._open.get(end.transfer_id)
        if entry is None or rank not in entry.waiting_for or end.generation != entry.generation:
            return None
        entry.waiting_for.remove(rank)
        work = self._work[rank, entry.on_disk]
        work.num_open -= 1
        work.moved_at = now
        entry.failed.update(end.failed)
        entry.error = entry.error or end.error
        if entry.waiting_for:
            return None
        del self._open[end.transfer_id]
        return TransferEnd(end.transfer_id, end.generation, sorted(entry.failed), entry.error)

    @property
    def deadline(self) -> float | None:
        """When a rank has ended nothing for too long, though there is something to do; None if there is not.

        A disk that is slow but moves is none that hangs, however many transfers wait for it.
        """
        moved = [work.moved_at for work in self._work.values() if work.num_open]
        return min(moved) + self._timeout_s if moved else None
