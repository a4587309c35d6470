"""The text that Prometheus reads, made of a snapshot by Prometheus' own library."""

from __future__ import annotations

import math
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pagoda.api.metrics import Snapshot
from pagoda.api.request_metrics import HISTOGRAMS
from pagoda.frontend.request_tracker import REFUSED
from pagoda.messages.figures import Figure, figures_of
from pagoda.messages.frontend import EngineReady
from pagoda.messages.load import (
    PHASES,
    STEP_SEQUENCE_BOUNDS,
    STEP_TOKEN_BOUNDS,
    LoadReport,
    TierLoad,
)
from pagoda.telemetry.histogram import Histogram
from pagoda.version import __version__

_PREFIX = "pagoda_"
_REPLICA = ("model_name", "replica")


def render(snapshot: Snapshot, *, aliases: bool) -> str:
    """All metrics as text; with `aliases`, some of them under vLLM's names too."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once([*families(snapshot), *(aliases_of(snapshot) if aliases else ())]))
    return generate_latest(registry).decode()


@dataclass(frozen=True, eq=False)
class _Once:
    metrics: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Metrics under Pagoda's names, in the order of docs/metrics.md."""
    yield _build_info()
    yield from _requests(snapshot)
    yield _memory(snapshot)
    if snapshot.report is not None:
        yield from _dispatcher(snapshot.model_name, snapshot.report)
        yield from _replicas(snapshot.model_name, snapshot.report)


def _gauge(name: str, help_text: str, labels: Sequence[str], series: Any) -> Metric:
    return family(GaugeMetricFamily, f"{_PREFIX}{name}", help_text, labels, series)


def _counter(name: str, help_text: str, labels: Sequence[str], series: Any) -> Metric:
    return family(CounterMetricFamily, f"{_PREFIX}{name}", help_text, labels, series)


# ---- the server


def _build_info() -> Metric:
    labels = {"version": __version__, "python": platform.python_version()}
    help_text = "What runs here; the value is always 1."
    return _gauge("build_info", help_text, list(labels), [(list(labels.values()), 1)])


def _memory(snapshot: Snapshot) -> Metric:
    own = snapshot.own_memory
    processes = [] if own is None else [("", own)]
    if snapshot.report is not None:
        for replica, report in reports_of(snapshot.report).items():
            processes += [(replica, process) for process in report.processes]
    return _gauge(
        "process_resident_memory_bytes",
        "Memory of a process; memory that several processes share counts in each.",
        ["replica", "process"],
        [([replica, process.role], process.resident_bytes) for replica, process in processes],
    )


def _requests(snapshot: Snapshot) -> Iterator[Metric]:
    requests, model = snapshot.requests, snapshot.model_name
    yield _counter(
        "requests_total",
        "Answers that have ended, by the reason of their end.",
        ["model_name", "key", "finish_reason"],
        [
            ([model, key, reason], count)
            for key, counts in requests.finished.items()
            for reason, count in counts.items()
        ],
    )
    yield _counter(
        "answer_tokens_total",
        "Tokens of answers, as they come.",
        ["model_name", "key"],
        [([model, key], count) for key, count in requests.num_tokens.items()],
    )
    yield _gauge(
        "longest_wait_seconds",
        "How long the request that waits longest for its first token has done so; 0 if none does.",
        ["model_name"],
        [([model], snapshot.longest_wait_s)],
    )
    yield _counter(
        "http_errors_total",
        "Requests that were answered with an error, by route, status and the kind of the error.",
        ["route", "status", "code"],
        [
            ([refusal.route, str(refusal.status), refusal.code], count)
            for refusal, count in sorted(requests.refusals.items())
        ],
    )
    for name, kind in HISTOGRAMS.items():
        own = [([model, key], histogram) for key, histogram in requests.histograms[name].items()]
        yield histograms(f"{_PREFIX}{name}", kind.help_text, ["model_name", "key"], own)


# ---- replicas


def _dispatcher(model: str, report: LoadReport) -> Iterator[Metric]:
    """Metrics that include replicas which have not answered."""
    yield _gauge(
        "replica_ready",
        "Whether a replica computes.",
        _REPLICA,
        [([model, replica.name], replica.state == "ready") for replica in report.replicas],
    )
    yield _counter(
        "engine_restarts_total",
        "Engines lost; each is started again, unless too many were lost in a row.",
        _REPLICA,
        [([model, replica.name], replica.num_losses) for replica in report.replicas],
    )
    yield _gauge(
        "num_requests_unplaced",
        "Requests that wait for a replica that takes them.",
        ["model_name"],
        [([model], num_unplaced(report))],
    )


def _replicas(model: str, report: LoadReport) -> Iterator[Metric]:
    reports = reports_of(report)
    for field, figures in figures_of(LoadReport).items():
        for figure in figures:
            if figure.name and (not figure.label or getattr(report, field)):
                series = [([model, name], getattr(own, field)) for name, own in reports.items()]
                yield _declared(figure, _REPLICA, series)
    yield from _steps(model, reports)
    yield _kv_usage(model, reports)
    tiers = [
        ([model, name, tier.name], tier) for name, own in reports.items() for tier in own.tiers
    ]
    for field, (figure,) in figures_of(TierLoad).items() if tiers else ():
        series = [(labels, getattr(tier, field)) for labels, tier in tiers]
        yield _declared(figure, (*_REPLICA, "tier"), series)


def _declared(
    figure: Figure, labels: Sequence[str], series: Sequence[tuple[list[str], Any]]
) -> Metric:
    """The metric of a declared figure, from label values and the figure; a list has a series for each item."""
    make = _counter if figure.is_counter else _gauge
    if not figure.label:
        return make(figure.name, figure.help_text, labels, series)
    items = [([*own, str(index)], item) for own, row in series for index, item in enumerate(row)]
    return make(figure.name, figure.help_text, (*labels, figure.label), items)


def _steps(model: str, reports: dict[str, LoadReport]) -> Iterator[Metric]:
    for name, help_text, histogram_of in (
        ("step_tokens", "Tokens of a step.", step_tokens),
        ("step_sequences", "Requests that take part in a step.", step_sequences),
    ):
        own = [([model, replica], histogram_of(report)) for replica, report in reports.items()]
        yield histograms(f"{_PREFIX}{name}", help_text, _REPLICA, own)
    yield _counter(
        "step_phase_seconds_total",
        "Where the time of steps went.",
        (*_REPLICA, "phase"),
        [
            ([model, replica, phase], getattr(report.steps, field))
            for replica, report in reports.items()
            for phase, field in PHASES.items()
        ],
    )


def _kv_usage(model: str, reports: dict[str, LoadReport]) -> Metric:
    usage = {}
    for replica, report in reports.items():
        usage[model, replica, "device"] = device_usage(report)
        for tier in report.tiers:
            if tier.num_total_blocks:
                usage[model, replica, tier.name] = tier.num_blocks / tier.num_total_blocks
    return _gauge(
        "kv_cache_usage_ratio",
        "The part of a tier's blocks that is in use, from 0 to 1; of the device's, by requests.",
        (*_REPLICA, "tier"),
        usage.items(),
    )


Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def family(
    kind: Family,
    name: str,
    help_text: str,
    labels: Sequence[str],
    series: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """A metric with a series for each tuple of label values."""
    metric = kind(name, help_text, labels=labels)
    for own_labels, value in series:
        metric.add_metric(own_labels, value)
    return metric


def histograms(
    name: str,
    help_text: str,
    labels: Sequence[str],
    series: Iterable[tuple[Sequence[str], Histogram]],
) -> Metric:
    """A metric of histograms, whose buckets are cumulative."""
    metric = HistogramMetricFamily(name, help_text, labels=labels)
    for own_labels, histogram in series:
        buckets, so_far = [], 0
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if math.isinf(bound) else str(float(bound)), float(so_far)))
        metric.add_metric(own_labels, buckets, histogram.sum)
    return metric


def reports_of(report: LoadReport) -> dict[str, LoadReport]:
    """The report of each replica that has answered in time."""
    return {
        replica.name: replica.report for replica in report.replicas if replica.report is not None
    }


def num_unplaced(report: LoadReport) -> int:
    """Waiting requests that no replica has."""
    if not report.replicas:
        return 0
    return report.num_waiting - sum(own.num_waiting for own in reports_of(report).values())


def device_usage(report: LoadReport) -> float:
    """The share of the KV cache that requests hold, from 0 to 1."""
    return 1 - report.num_free_blocks / report.num_blocks if report.num_blocks else 0.0


def step_tokens(report: LoadReport) -> Histogram:
    return _histogram(STEP_TOKEN_BOUNDS, report.steps.by_tokens, report.steps.num_tokens)


def step_sequences(report: LoadReport) -> Histogram:
    return _histogram(STEP_SEQUENCE_BOUNDS, report.steps.by_sequences, report.steps.num_sequences)


def _histogram(bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
    histogram = Histogram(bounds)
    histogram.counts[: len(counts)] = counts
    histogram.sum = total
    return histogram


_VLLM_PREFIX = "vllm:"
_VLLM_HELP = "As vLLM has it."
_ENGINE = ("model_name", "engine")
_NO_ENGINE = ""
"""The label of requests that wait for an engine. Autoscalers add up what waits over all engines."""
_VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "request_duration_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_prefill_time_seconds",
    "request_decode_time_seconds": "request_decode_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generated_tokens",
}
"""Pagoda's name of each histogram of vLLM."""


def aliases_of(snapshot: Snapshot) -> Iterator[Metric]:
    yield from _of_requests(snapshot)
    if snapshot.report is not None:
        yield from _of_engines(snapshot.model_name, snapshot.report)
        if snapshot.limits is not None:
            yield _cache_config(reports_of(snapshot.report), snapshot.limits)


def _of_requests(snapshot: Snapshot) -> Iterator[Metric]:
    finished = snapshot.requests.finished.values()
    reasons = sorted({reason for counts in finished for reason in counts} - {REFUSED})
    yield family(
        CounterMetricFamily,
        f"{_VLLM_PREFIX}request_success_total",
        "Answers that have ended, by the reason of their end.",
        ["model_name", "finished_reason"],
        [
            ([snapshot.model_name, reason], sum(counts[reason] for counts in finished))
            for reason in reasons
        ],
    )
    for name, own_name in _VLLM_HISTOGRAMS.items():
        help_text = HISTOGRAMS[own_name].help_text
        total = snapshot.requests.total(own_name)
        series = [([snapshot.model_name], total)]
        yield histograms(f"{_VLLM_PREFIX}{name}", help_text, ["model_name"], series)


def _of_engines(model: str, whole: LoadReport) -> Iterator[Metric]:
    reports = reports_of(whole)
    for name, (is_counter, fields) in _declared_aliases().items():
        values = {
            engine: sum(getattr(report, field) for field in fields)
            for engine, report in reports.items()
        }
        if name == "num_requests_waiting":
            values[_NO_ENGINE] = num_unplaced(whole)
        kind = CounterMetricFamily if is_counter else GaugeMetricFamily
        series = [([model, engine], value) for engine, value in values.items()]
        yield family(kind, f"{_VLLM_PREFIX}{name}", _VLLM_HELP, _ENGINE, series)
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        usage = [([model, engine], device_usage(report)) for engine, report in reports.items()]
        yield family(GaugeMetricFamily, f"{_VLLM_PREFIX}{name}", _VLLM_HELP, _ENGINE, usage)
    tokens = [([model, engine], step_tokens(report)) for engine, report in reports.items()]
    yield histograms(f"{_VLLM_PREFIX}iteration_tokens_total", "Tokens of a step.", _ENGINE, tokens)


def _declared_aliases() -> dict[str, tuple[bool, list[str]]]:
    """The declared aliases: for each of vLLM's names, True for a counter, and the fields of a load report that
    are added up."""
    aliases: defaultdict[str, list[str]] = defaultdict(list)
    counters = set()
    for field, figures in figures_of(LoadReport).items():
        for figure in figures:
            for name in figure.vllm:
                aliases[name].append(field)
                if figure.is_counter:
                    counters.add(name)
    return {name: (name in counters, fields) for name, fields in aliases.items()}


def _cache_config(reports: dict[str, LoadReport], limits: EngineReady) -> Metric:
    return family(
        GaugeMetricFamily,
        f"{_VLLM_PREFIX}cache_config_info",
        "The size of the KV cache; the value is always 1.",
        ["engine", "block_size", "num_gpu_blocks"],
        [
            ([engine, str(limits.block_size), str(report.num_blocks)], 1)
            for engine, report in reports.items()
        ],
    )
