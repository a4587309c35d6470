"""Growth of the counters of replicas from one report to the next.

Sums over replicas cannot be compared: a replica that misses a query seems to count nothing, then a lot at once;
and hosts come and go. Therefore each replica is compared with itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pagoda.messages.load import LoadReport, ReplicaLoad

_COUNTERS = (
    "num_prompt_tokens",
    "num_prefix_hit_tokens",
    "num_preemptions",
    "num_worker_restarts",
)


@dataclass(frozen=True)
class Growth:
    """Growth of all replicas, each since its own last report."""

    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    prompt_tokens_per_s: float


class Progress:
    """Keeps the last counters of each replica, and totals that never fall."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, Counter[str]]] = {}
        """The time and the counters of the last report, by replica."""
        self._losses: Counter[str] = Counter()
        """Engines lost, by replica."""
        self._totals: Counter[str] = Counter()

    @property
    def num_preemptions(self) -> int:
        return self._totals["num_preemptions"]

    @property
    def num_restarts(self) -> int:
        """Restarts of workers and engines."""
        return self._totals["num_worker_restarts"] + self._losses.total()

    def update(self, report: LoadReport, now: float, since: float) -> Growth:
        """Takes a report. A replica whose last report is from before `since` adds nothing to the growth."""
        grown: Counter[str] = Counter()
        rate = 0.0
        own = ReplicaLoad(name="", state="", num_requests=0, weighed_tokens=0, report=report)
        for replica in report.replicas or (own,):
            self._losses[replica.name] = max(self._losses[replica.name], replica.num_losses)
            if replica.report is None:
                continue
            counts = Counter({name: getattr(replica.report, name) for name in _COUNTERS})
            seen_at, before = self._seen.get(replica.name, (None, Counter()))
            more = counts - before  # a host that was started again counts from zero: no growth
            self._seen[replica.name] = now, counts
            self._totals.update(more)
            if seen_at is not None and seen_at >= since:
                grown.update(more)
                rate += more["num_prompt_tokens"] / max(now - seen_at, 1e-3)
        return Growth(grown["num_prompt_tokens"], grown["num_prefix_hit_tokens"], rate)
