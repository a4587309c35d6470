# SPDX-License-Identifier: Apache-2.0
"""Sums over the replicas behind a dispatcher: what looks like one engine from above."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagoda.messages.figures import merged, without_gauges
from pagoda.messages.load import LoadReport, ReplicaLoad


class CounterHistory:
    """The counters of one replica over all its engines. They never fall, though each engine counts from zero."""

    def __init__(self) -> None:
        self._ended: LoadReport | None = None
        """Counters of engines that are no more."""
        self.last: LoadReport | None = None
        """The last report of the engine that runs."""

    def update(self, report: LoadReport) -> LoadReport:
        """Takes a report of the engine that runs; returns it with the counters of the engines before it."""
        self.last = report
        return report if self._ended is None else merged([report, self._ended])

    def on_engine_lost(self) -> None:
        """The next report is that of another engine, which counts from zero."""
        self._ended, self.last = self.counters, None

    @property
    def counters(self) -> LoadReport | None:
        """Counters of all engines so far, without what an engine counted after its last report; None before the
        first report."""
        if self.last is None:
            return self._ended
        counters = counters_of(self.last)
        return counters if self._ended is None else merged([self._ended, counters])


def counters_of(report: LoadReport) -> LoadReport:
    """The counters of a report, without its gauges and replicas."""
    return msgspec.structs.replace(
        without_gauges(report),
        tiers=tuple(map(without_gauges, report.tiers)),
        is_worker_ready=True,
        query_id=None,
        replicas=(),
    )


def sum_of_loads(
    replicas: tuple[ReplicaLoad, ...], *, num_unplaced: int, counted: Sequence[LoadReport] = ()
) -> LoadReport:
    """The report of a dispatcher.

    Args:
        num_held: Requests that are with no replica.
        counted: Counters of replicas that have not answered (`CounterHistory.counters`).
    """
    reports = [replica.report for replica in replicas if replica.report is not None]
    sums = merged([LoadReport(), *reports, *counted])
    return msgspec.structs.replace(
        sums,
        num_waiting=sums.num_waiting + num_unplaced,
        num_engine_restarts=sum(replica.num_losses for replica in replicas),
        is_worker_ready=any(report.is_worker_ready for report in reports),
        replicas=replicas,
    )
