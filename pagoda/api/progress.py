"""What replicas have counted, from one look at them to the next.

Sums over replicas cannot be compared: they fall when one does not answer in time, and rise by all that it ever
counted when it does again. So each is compared with itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pagoda.messages.load import LoadReport

_COUNTERS = (
    "num_prompt_tokens",
    "num_prefix_hit_tokens",
    "num_preemptions",
    "num_worker_restarts",
)


@dataclass(frozen=True)
class Growth:
    """Of all replicas, each since it was seen before."""

    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    prompt_tokens_per_s: float


class Progress:
    """Keeps what each replica said last. Whatever was counted before an engine was started again still counts."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, Counter[str]]] = {}
        """What counts, with the time at which it was told."""
        self._totals: Counter[str] = Counter()

    @property
    def num_preemptions(self) -> int:
        return self._totals["num_preemptions"]

    @property
    def num_restarts(self) -> int:
        """Of workers, and of engines."""
        return self._totals["num_worker_restarts"] + self._totals["num_losses"]

    def take(self, report: LoadReport, now: float, since: float) -> Growth:
        """Growth is of replicas that were seen at `since` or later; of others it is not known when they grew."""
        grown: Counter[str] = Counter()
        rate = 0.0
        for source, counts in _sources(report, "all"):
            seen_at, before = self._seen.get(source, (None, Counter()))
            more = (
                counts - before
            )  # an engine that was started again counts anew: nothing is negative
            self._seen[source] = now, counts
            self._totals.update(more)
            if seen_at is not None and seen_at >= since:
                grown.update(more)
                rate += more["num_prompt_tokens"] / max(now - seen_at, 1e-3)
        return Growth(grown["num_prompt_tokens"], grown["num_prefix_hit_tokens"], rate)


def _sources(report: LoadReport, name: str) -> Iterator[tuple[str, Counter[str]]]:
    """Engines by themselves, also those behind hosts. Losses are known of those that do not answer, too."""
    for replica in report.replicas:
        own = f"{name}/{replica.name}"
        yield f"{own} losses", Counter(num_losses=replica.num_losses)
        if replica.report is not None:
            yield from _sources(replica.report, own)
    if not report.replicas:
        yield name, Counter({counter: getattr(report, counter) for counter in _COUNTERS})
