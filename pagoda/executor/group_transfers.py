"""Transfers of a replica: every rank copies its part, and a transfer has ended when all have."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.engine.messages import Transfer, TransferEnd


class _Open:
    """A transfer under way."""

    def __init__(self, generation: int, num_ranks: int, deadline: float) -> None:
        self.generation = generation
        self.waiting_for = set(range(num_ranks))
        self.deadline = deadline
        self.failed: set[int] = set()
        self.error = ""


class GroupTransfers:
    """What the ranks of one start still have to do. Ends that it does not wait for change nothing."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._open: dict[int, _Open] = {}
        """By id, the oldest first."""

    def begin(self, transfers: Sequence[Transfer], now: float) -> None:
        deadline = now + self._timeout_s
        for transfer in transfers:
            self._open[transfer.transfer_id] = _Open(transfer.generation, self._num_ranks, deadline)

    def end(self, rank: int, end: TransferEnd) -> TransferEnd | None:
        """One rank has ended its part; returns what is to be said of all, once the last one has."""
        entry = self._open.get(end.transfer_id)
        if entry is None or rank not in entry.waiting_for or end.generation != entry.generation:
            return None
        entry.waiting_for.remove(rank)
        entry.failed.update(end.failed)
        entry.error = entry.error or end.error
        if entry.waiting_for:
            return None
        del self._open[end.transfer_id]
        return TransferEnd(end.transfer_id, end.generation, sorted(entry.failed), entry.error)

    @property
    def deadline(self) -> float | None:
        """When the oldest takes too long; None if there is none."""
        oldest = next(iter(self._open.values()), None)
        return None if oldest is None else oldest.deadline
