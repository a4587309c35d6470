"""What several replicas are together: one engine to whoever looks from above."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from pagoda.messages.load import LoadReport, ReplicaLoad, StepTotals, TierLoad

_GAUGES = (
    "num_running",
    "num_waiting",
    "num_awaiting_kv",
    "num_pending_tokens",
    "num_free_blocks",
    "num_cached_blocks",
    "num_blocks",
    "num_leases",
    "num_wanted_leases",
    "num_leased_blocks",
)
_COUNTERS = (
    "num_steps",
    "num_preemptions",
    "num_worker_restarts",
    "num_blocks_stored",
    "num_blocks_removed",
    "num_prefix_hit_tokens",
    "num_prompt_tokens",
    "num_leases_expired",
    "num_generated_tokens",
)
_STEP_SUMS = (
    "num_tokens",
    "num_sequences",
    "schedule_s",
    "submit_s",
    "wait_s",
    "prepare_s",
    "forward_s",
    "sample_s",
    "update_s",
)


class Counted:
    """What one replica has counted, over all its engines: sums over replicas do not fall when one does not answer,
    or begins anew."""

    def __init__(self) -> None:
        self._ended: LoadReport | None = None
        """Of engines that are no more."""
        self._last: LoadReport | None = None

    def take(self, report: LoadReport) -> None:
        """It has answered."""
        if self._last is not None and report.num_steps < self._last.num_steps:
            both = [one for one in (self._ended, self._last) if one is not None]
            self._ended = _counters_of(_sum(both))
        self._last = report

    @property
    def num_losses(self) -> int:
        """Of engines behind it."""
        parts = (self._ended, self._last)
        return sum(part.num_engine_restarts for part in parts if part is not None)

    def beside(self, report: LoadReport | None) -> list[LoadReport]:
        """Counters that belong to its sum, besides those of its answer, if there is one."""
        beside = [] if self._ended is None else [self._ended]
        if report is None and self._last is not None:
            beside.append(_counters_of(self._last))
        return beside


def sum_of_loads(
    replicas: tuple[ReplicaLoad, ...], *, num_held: int, counted: Sequence[LoadReport] = ()
) -> LoadReport:
    """`num_held` requests are with none of them; `counted` is what they have counted besides (`Counted`)."""
    reports = [replica.report for replica in replicas if replica.report is not None]
    sums = _sum([*reports, *counted])
    return msgspec.structs.replace(
        sums,
        num_waiting=sums.num_waiting + num_held,
        num_engine_restarts=sum(replica.num_losses for replica in replicas),
        is_worker_ready=any(report.is_worker_ready for report in reports),
        replicas=replicas,
    )


def _sum(reports: Sequence[LoadReport]) -> LoadReport:
    names = (*_GAUGES, *_COUNTERS, "num_engine_restarts")
    return LoadReport(
        **{name: sum(getattr(report, name) for report in reports) for name in names},
        step_time_s=max((report.step_time_s for report in reports), default=0.0),
        stalled_for_s=max((report.stalled_for_s for report in reports), default=0.0),
        tiers=_sum_of_tiers([tier for report in reports for tier in report.tiers]),
        expert_tokens=_added([report.expert_tokens for report in reports]),
        expert_rank_tokens=_added([report.expert_rank_tokens for report in reports]),
        steps=_sum_of_steps([report.steps for report in reports]),
        processes=tuple(process for report in reports for process in report.processes),
    )


def _counters_of(report: LoadReport) -> LoadReport:
    """Without what says how things are now."""
    return msgspec.structs.replace(
        report,
        **dict.fromkeys(_GAUGES, 0),
        step_time_s=0.0,
        stalled_for_s=0.0,
        tiers=tuple(
            msgspec.structs.replace(tier, num_blocks=0, num_total_blocks=0, is_indexed=True)
            for tier in report.tiers
        ),
        processes=(),
        replicas=(),
    )


def _sum_of_tiers(tiers: Sequence[TierLoad]) -> tuple[TierLoad, ...]:
    """By name, in the order of the first. What is in a tier that all replicas see counts once."""
    sums: dict[str, TierLoad] = {}
    for tier in tiers:
        so_far = sums.get(tier.name)
        if so_far is None:
            sums[tier.name] = tier
            continue
        join = max if tier.is_shared else operator.add
        sums[tier.name] = TierLoad(
            name=tier.name,
            num_blocks=join(so_far.num_blocks, tier.num_blocks),
            num_total_blocks=join(so_far.num_total_blocks, tier.num_total_blocks),
            num_stored=so_far.num_stored + tier.num_stored,
            num_removed=so_far.num_removed + tier.num_removed,
            num_loaded=so_far.num_loaded + tier.num_loaded,
            num_failed=so_far.num_failed + tier.num_failed,
            is_indexed=so_far.is_indexed and tier.is_indexed,
            is_shared=tier.is_shared,
        )
    return tuple(sums.values())


def _sum_of_steps(totals: Sequence[StepTotals]) -> StepTotals:
    sums = {name: sum(getattr(one, name) for one in totals) for name in _STEP_SUMS}
    return StepTotals(
        **sums,
        by_tokens=_added([one.by_tokens for one in totals]),
        by_sequences=_added([one.by_sequences for one in totals]),
    )


def _added(counts: Sequence[Sequence[int]]) -> list[int]:
    """The sums over replicas; one that has computed nothing yet has an empty list."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
