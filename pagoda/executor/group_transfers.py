"""KV transfers under way on all ranks of a replica, each of which copies its part and says when it has ended."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.engine.messages import Transfer, TransferEnd


class GroupTransfers:
    """The ranks' ends of a transfer, put together: it has ended when it has on every rank.

    Ends of a transfer that is not under way, and further ends from the same rank, change nothing.
    """

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._under_way: dict[tuple[int, int], _UnderWay] = {}
        """By id and generation, in the order in which they began."""

    @property
    def deadline(self) -> float | None:
        """When the first of them has taken too long; None when there is none."""
        return next((transfer.deadline for transfer in self._under_way.values()), None)

    def begin(self, transfers: Sequence[Transfer], now: float) -> None:
        for transfer in transfers:
            key = (transfer.transfer_id, transfer.generation)
            self._under_way[key] = _UnderWay(now + self._timeout_s)

    def end(self, rank: int, end: TransferEnd) -> TransferEnd | None:
        """Takes what one rank says; what is to be said of all, once the last of them has ended."""
        key = (end.transfer_id, end.generation)
        transfer = self._under_way.get(key)
        if transfer is None:
            return None
        transfer.ends.setdefault(rank, end)
        if len(transfer.ends) < self._num_ranks:
            return None
        del self._under_way[key]
        return _join([transfer.ends[rank] for rank in range(self._num_ranks)])


class _UnderWay:
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.ends: dict[int, TransferEnd] = {}
        """By rank."""


def _join(ends: Sequence[TransferEnd]) -> TransferEnd:
    """The end of one transfer from those of all ranks."""
    failures = [end for end in ends if end.failed]
    if not failures:
        return ends[0]
    first = min(failures, key=lambda end: min(end.failed))
    failed = sorted(set().union(*(end.failed for end in failures)))
    return TransferEnd(first.transfer_id, first.generation, failed, first.error)
