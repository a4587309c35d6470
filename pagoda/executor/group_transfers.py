"""KV transfers under way on all ranks of a replica, each of which copies its part and says when it has ended."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.engine.messages import DiskObjects, Transfer, TransferEnd


class GroupTransfers:
    """The ranks' ends of a transfer, put together: it has ended when it has on every rank.

    Ends of a transfer that is not under way, and further ends from the same rank, change nothing.
    """

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._under_way: dict[tuple[int, int], _UnderWay] = {}
        """By id and generation."""
        self._work = {
            (rank, on_disk): _Work() for rank in range(num_ranks) for on_disk in (False, True)
        }

    @property
    def deadline(self) -> float | None:
        """When a rank has ended nothing for too long, though there is something to do; None if there is not.

        A disk that is slow but moves is none that hangs, however many transfers wait for it.
        """
        moved = (work.moved_at for work in self._work.values() if work.num_open)
        oldest = min(moved, default=None)
        return None if oldest is None else oldest + self._timeout_s

    def begin(self, transfers: Sequence[Transfer], now: float) -> None:
        for transfer in transfers:
            entry = _UnderWay(transfer)
            self._under_way[transfer.transfer_id, transfer.generation] = entry
            for rank in range(self._num_ranks):
                work = self._work[rank, entry.on_disk]
                if work.num_open == 0:
                    work.moved_at = now
                work.num_open += 1

    def end(self, rank: int, end: TransferEnd, now: float) -> TransferEnd | None:
        """Takes what one rank says; what is to be said of all, once the last of them has ended."""
        key = (end.transfer_id, end.generation)
        entry = self._under_way.get(key)
        if entry is None or rank in entry.ends:
            return None
        work = self._work[rank, entry.on_disk]
        work.num_open -= 1
        work.moved_at = now
        entry.ends[rank] = end
        if len(entry.ends) < self._num_ranks:
            return None
        del self._under_way[key]
        return _join([entry.ends[rank] for rank in range(self._num_ranks)])


class _UnderWay:
    def __init__(self, transfer: Transfer) -> None:
        self.on_disk = isinstance(transfer.source, DiskObjects) or isinstance(
            transfer.target, DiskObjects
        )
        self.ends: dict[int, TransferEnd] = {}
        """By rank."""


class _Work:
    """What one rank has to do with its disk, or without."""

    def __init__(self) -> None:
        self.num_open = 0
        self.moved_at = 0.0
        """When the last of it ended, or the first of it began."""


def _join(ends: Sequence[TransferEnd]) -> TransferEnd:
    """The end of one transfer from those of all ranks."""
    failures = [end for end in ends if end.failed]
    if not failures:
        return ends[0]
    first = min(failures, key=lambda end: min(end.failed))
    failed = sorted(set().union(*(end.failed for end in failures)))
    bad = set().union(*(set(end.failed).difference(end.unreadable) for end in failures))
    unreadable = [index for index in failed if index not in bad]
    return TransferEnd(first.transfer_id, first.generation, failed, first.error, unreadable)
