"""The text that Prometheus reads, made of a snapshot by Prometheus' own library."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pagoda.api.metric_series import (
    add_histogram,
    device_usage,
    num_unplaced,
    reports_of,
    step_sequences,
    step_tokens,
)
from pagoda.api.metrics import Snapshot
from pagoda.api.request_metrics import HISTOGRAMS
from pagoda.api.vllm_names import aliases_of
from pagoda.messages.load import LoadReport
from pagoda.version import __version__

_PREFIX = "pagoda_"


def render(snapshot: Snapshot, *, aliases: bool) -> str:
    """All figures as text; with `aliases` some of them twice."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once([*families(snapshot), *(aliases_of(snapshot) if aliases else ())]))
    return generate_latest(registry).decode()


@dataclass(frozen=True, eq=False)
class _Once:
    """A collector of what is there already."""

    metrics: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """A series for each replica: where one is started again, its counters alone begin anew."""
    yield _build_info()
    yield from _of_requests(snapshot)
    yield _memory(snapshot)
    if snapshot.report is not None:
        yield from _of_replicas(snapshot.model_name, snapshot.report)


# ---- the server


def _build_info() -> Metric:
    labels = {"version": __version__, "python": platform.python_version()}
    info = GaugeMetricFamily(
        f"{_PREFIX}build_info", "What runs here; the value is always 1.", labels=list(labels)
    )
    info.add_metric(list(labels.values()), 1)
    return info


def _memory(snapshot: Snapshot) -> Metric:
    memory = GaugeMetricFamily(
        f"{_PREFIX}process_resident_memory_bytes",
        "What a process has in memory; what several share counts in each.",
        labels=["replica", "process"],
    )
    if snapshot.own_memory is not None:
        memory.add_metric(["", snapshot.own_memory.role], snapshot.own_memory.resident_bytes)
    for replica in () if snapshot.report is None else snapshot.report.replicas:
        for process in () if replica.report is None else replica.report.processes:
            memory.add_metric([replica.name, process.role], process.resident_bytes)
    return memory


def _of_requests(snapshot: Snapshot) -> Iterator[Metric]:
    requests, model = snapshot.requests, snapshot.model_name
    finished = CounterMetricFamily(
        f"{_PREFIX}requests_total",
        "Answers that have ended, by the reason of their end.",
        labels=["model_name", "key", "finish_reason"],
    )
    for key, counts in requests.finished.items():
        for reason, count in counts.items():
            finished.add_metric([model, key, reason], count)
    yield finished
    tokens = CounterMetricFamily(
        f"{_PREFIX}answer_tokens_total",
        "Tokens of answers, as they come.",
        labels=["model_name", "key"],
    )
    for key, count in requests.num_tokens.items():
        tokens.add_metric([model, key], count)
    yield tokens
    longest_wait = GaugeMetricFamily(
        f"{_PREFIX}longest_wait_seconds",
        "How long the request that waits longest for its first token has done so; 0 if none does.",
        labels=["model_name"],
    )
    longest_wait.add_metric([model], snapshot.longest_wait_s)
    yield longest_wait
    errors = CounterMetricFamily(
        f"{_PREFIX}http_errors_total",
        "Requests that were answered with an error, by route, status and the kind of the error.",
        labels=["route", "status", "code"],
    )
    for refusal, count in sorted(requests.refusals.items()):
        errors.add_metric([refusal.route, str(refusal.status), refusal.code], count)
    yield errors
    for name, kind in HISTOGRAMS.items():
        family = HistogramMetricFamily(
            f"{_PREFIX}{name}", kind.help_text, labels=["model_name", "key"]
        )
        for key, histogram in requests.histograms[name].items():
            add_histogram(family, [model, key], histogram)
        yield family


# ---- replicas


_GAUGES = {
    "num_requests_running": ("num_running", "Requests that run."),
    "num_requests_waiting": ("num_waiting", "Requests that wait."),
    "num_requests_awaiting_kv": (
        "num_awaiting_kv",
        "Requests that wait for KV blocks from a tier below the device.",
    ),
    "num_tokens_pending": ("num_pending_tokens", "Prompt and output tokens not yet computed."),
    "kv_cache_blocks": ("num_blocks", "Blocks of the KV cache."),
    "kv_cache_free_blocks": ("num_free_blocks", "Blocks of it that are free or can be evicted."),
    "kv_leases": ("num_leases", "Requests whose KV is held for other engines."),
    "kv_leased_blocks": ("num_leased_blocks", "KV blocks of them."),
    "step_time_seconds": ("step_time_s", "Duration of a step, as a moving average."),
    "stalled_seconds": (
        "stalled_for_s",
        "How long no step has finished although there is work; 0 when idle.",
    ),
}
_COUNTERS = {
    "prompt_tokens_total": ("num_prompt_tokens", "Prompt tokens of requests that were admitted."),
    "generated_tokens_total": ("num_generated_tokens", "Tokens sampled."),
    "num_preemptions_total": ("num_preemptions", "Requests preempted for want of KV blocks."),
    "prefix_cache_queries_total": ("num_prompt_tokens", "Prompt tokens looked for in the cache."),
    "prefix_cache_hits_total": ("num_prefix_hit_tokens", "Prompt tokens found in the cache."),
    "kv_blocks_stored_total": ("num_blocks_stored", "KV blocks that later requests could find."),
    "kv_blocks_removed_total": (
        "num_blocks_removed",
        "KV blocks evicted, or lost with a worker, that could be found before.",
    ),
    "kv_leases_expired_total": (
        "num_leases_expired",
        "Requests whose KV was held for other engines, and not fetched in time.",
    ),
    "engine_steps_total": ("num_steps", "Steps finished."),
    "worker_restarts_total": ("num_worker_restarts", "Workers lost and started again."),
}
_BY_INDEX = {
    "expert_tokens_total": (
        "expert_tokens",
        "expert",
        "Tokens given to an expert, over all layers.",
    ),
    "expert_rank_tokens_total": (
        "expert_rank_tokens",
        "rank",
        "Tokens given to the experts of a rank, over all layers.",
    ),
}
_TIER_GAUGES = {
    "kv_tier_blocks": ("num_blocks", "KV blocks that a tier below the device holds."),
    "kv_tier_capacity_blocks": ("num_total_blocks", "KV blocks that it has room for."),
    "kv_tier_indexed": ("is_indexed", "Whether all that it holds is known."),
}
_TIER_COUNTERS = {
    "kv_tier_blocks_stored_total": ("num_stored", "KV blocks written to a tier."),
    "kv_tier_blocks_removed_total": ("num_removed", "KV blocks removed from a tier."),
    "kv_tier_blocks_loaded_total": ("num_loaded", "KV blocks loaded from a tier."),
    "kv_tier_blocks_failed_total": (
        "num_failed",
        "KV blocks that could not be written to a tier, or loaded from it.",
    ),
}
_PHASES = {
    "schedule": "schedule_s",
    "submit": "submit_s",
    "wait": "wait_s",
    "prepare": "prepare_s",
    "forward": "forward_s",
    "sample": "sample_s",
    "update": "update_s",
}
_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _of_replicas(model: str, report: LoadReport) -> Iterator[Metric]:
    yield from _of_all_replicas(model, report)
    reports = reports_of(report)
    kinds: tuple[tuple[_Family, dict[str, tuple[str, str]]], ...] = (
        (GaugeMetricFamily, _GAUGES),
        (CounterMetricFamily, _COUNTERS),
    )
    for family, table in kinds:
        for name, (field, help_text) in table.items():
            metric = family(f"{_PREFIX}{name}", help_text, labels=["model_name", "replica"])
            for replica, own in reports.items():
                metric.add_metric([model, replica], getattr(own, field))
            yield metric
    yield from _of_steps(model, reports)
    yield _kv_usage(model, reports)
    if report.tiers:
        yield from _of_tiers(model, reports)
    for name, (field, label, help_text) in _BY_INDEX.items():
        if getattr(report, field):
            labels = ["model_name", "replica", label]
            metric = CounterMetricFamily(f"{_PREFIX}{name}", help_text, labels=labels)
            for replica, own in reports.items():
                for number, value in enumerate(getattr(own, field)):
                    metric.add_metric([model, replica, str(number)], value)
            yield metric


def _of_all_replicas(model: str, report: LoadReport) -> Iterator[Metric]:
    """Also of those that did not answer."""
    labels = ["model_name", "replica"]
    ready = GaugeMetricFamily(
        f"{_PREFIX}replica_ready", "Whether a replica computes.", labels=labels
    )
    restarts = CounterMetricFamily(
        f"{_PREFIX}engine_restarts_total",
        "Engines lost; each is started again, unless too many were lost in a row.",
        labels=labels,
    )
    for replica in report.replicas:
        ready.add_metric([model, replica.name], replica.state == "ready")
        restarts.add_metric([model, replica.name], replica.num_losses)
    yield ready
    yield restarts
    unplaced = GaugeMetricFamily(
        f"{_PREFIX}num_requests_unplaced",
        "Requests that wait for a replica that takes them.",
        labels=["model_name"],
    )
    unplaced.add_metric([model], num_unplaced(report))
    yield unplaced


def _of_steps(model: str, reports: dict[str, LoadReport]) -> Iterator[Metric]:
    labels = ["model_name", "replica"]
    tokens = HistogramMetricFamily(f"{_PREFIX}step_tokens", "Tokens of a step.", labels=labels)
    sequences = HistogramMetricFamily(
        f"{_PREFIX}step_sequences", "Requests that take part in a step.", labels=labels
    )
    phases = CounterMetricFamily(
        f"{_PREFIX}step_phase_seconds_total",
        "Where the time of steps went.",
        labels=[*labels, "phase"],
    )
    for replica, own in reports.items():
        add_histogram(tokens, [model, replica], step_tokens(own))
        add_histogram(sequences, [model, replica], step_sequences(own))
        for phase, field in _PHASES.items():
            phases.add_metric([model, replica, phase], getattr(own.steps, field))
    yield from (tokens, sequences, phases)


def _kv_usage(model: str, reports: dict[str, LoadReport]) -> Metric:
    usage = GaugeMetricFamily(
        f"{_PREFIX}kv_cache_usage_ratio",
        "The part of a tier's blocks that is in use, from 0 to 1; of the device's, by requests.",
        labels=["model_name", "replica", "tier"],
    )
    for replica, own in reports.items():
        usage.add_metric([model, replica, "device"], device_usage(own))
        for tier in own.tiers:
            if tier.num_total_blocks:
                ratio = tier.num_blocks / tier.num_total_blocks
                usage.add_metric([model, replica, tier.name], ratio)
    return usage


def _of_tiers(model: str, reports: dict[str, LoadReport]) -> Iterator[Metric]:
    kinds: tuple[tuple[_Family, dict[str, tuple[str, str]]], ...] = (
        (GaugeMetricFamily, _TIER_GAUGES),
        (CounterMetricFamily, _TIER_COUNTERS),
    )
    for family, table in kinds:
        for name, (field, help_text) in table.items():
            labels = ["model_name", "replica", "tier"]
            metric = family(f"{_PREFIX}{name}", help_text, labels=labels)
            for replica, own in reports.items():
                for tier in own.tiers:
                    metric.add_metric([model, replica, tier.name], getattr(tier, field))
            yield metric
