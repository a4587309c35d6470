# SPDX-License-Identifier: Apache-2.0
"""The text that Prometheus reads, made of a snapshot by Prometheus' own library."""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pagoda.api.monitoring.metrics import Snapshot
from pagoda.api.monitoring.request_metrics import HISTOGRAMS
from pagoda.messages.figures import Figure, figures_of
from pagoda.messages.load import (
    PHASES,
    STEP_SEQUENCE_BOUNDS,
    STEP_TOKEN_BOUNDS,
    LoadReport,
    TierLoad,
)
from pagoda.telemetry.histogram import Histogram
from pagoda.telemetry.request_tracker import REFUSED
from pagoda.version import __version__

_REPLICA = ("model_name", "replica")
_VLLM_ENGINE = ("model_name", "engine")
_VLLM_HELP = "As vLLM has it."
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

if TYPE_CHECKING:
    from _typeshed import SupportsItems

    Series = SupportsItems[tuple[str, ...], Any]
    """Values by the values of their labels."""


def render(snapshot: Snapshot, *, aliases: bool) -> str:
    """All metrics as text; with `aliases`, some of them under vLLM's names too."""
    metrics = [*families(snapshot), *(aliases_of(snapshot) if aliases else ())]
    return generate_latest(_Once(metrics)).decode()


@dataclass(frozen=True, eq=False)
class _Once(Collector):
    metrics: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def _metric(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help_text: str,
    labels: Sequence[str],
    series: Series,
) -> Metric:
    metric = kind(name, help_text, labels=labels)
    for own_labels, value in series.items():
        metric.add_metric(own_labels, value)
    return metric


_gauge, _counter = partial(_metric, GaugeMetricFamily), partial(_metric, CounterMetricFamily)


def _histograms(name: str, help_text: str, labels: Sequence[str], series: Series) -> Metric:
    """A metric of histograms, whose buckets are cumulative."""
    metric = HistogramMetricFamily(name, help_text, labels=labels)
    for own_labels, histogram in series.items():
        bounds = (*(str(float(bound)) for bound in histogram.bounds), "+Inf")
        buckets = zip(bounds, map(float, accumulate(histogram.counts)), strict=True)
        metric.add_metric(own_labels, list(buckets), histogram.sum)
    return metric


# ---- Pagoda's names


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Metrics under Pagoda's names, in the order of docs/metrics.md."""
    versions = {(__version__, platform.python_version()): 1}
    help_text = "What runs here; the value is always 1."
    yield _gauge("pagoda_build_info", help_text, ["version", "python"], versions)
    yield from _requests(snapshot)
    reports = {} if snapshot.report is None else reports_of(snapshot.report)
    processes = {"": snapshot.own_memory}
    processes |= {name: report.processes for name, report in reports.items()}
    yield _gauge(
        "pagoda_process_resident_memory_bytes",
        "Memory of a process; memory that several processes share counts in each.",
        ["replica", "process"],
        {(name, one.role): one.resident_bytes for name, some in processes.items() for one in some},
    )
    if snapshot.report is not None:
        yield from _dispatcher(snapshot.model_name, snapshot.report)
        models = {one.name: one.model or snapshot.model_name for one in snapshot.report.replicas}
        yield from _replicas(models, reports)


def _requests(snapshot: Snapshot) -> Iterator[Metric]:
    requests, model = snapshot.requests, snapshot.model_name
    yield _counter(
        "pagoda_requests_total",
        "Answers that have ended, by the reason of their end.",
        ["model_name", "key", "finish_reason"],
        {
            (of or model, key, reason): count
            for (of, key), own in requests.by_client.items()
            for reason, count in own.finished.items()
        },
    )
    yield _counter(
        "pagoda_answer_tokens_total",
        "Tokens of answers, as they come.",
        ["model_name", "key"],
        {(of or model, key): own.num_tokens for (of, key), own in requests.by_client.items()},
    )
    yield _gauge(
        "pagoda_longest_wait_seconds",
        "How long the request that waits longest for its first token has done so; 0 if none does.",
        ["model_name"],
        {(model,): snapshot.longest_wait_s},
    )
    yield _counter(
        "pagoda_http_errors_total",
        "Requests that were answered with an error, by route, status and the kind of the error.",
        ["route", "status", "code"],
        {
            (refusal.route, str(refusal.status), refusal.code): count
            for refusal, count in sorted(requests.refusals.items())
        },
    )
    for name, kind in HISTOGRAMS.items():
        series = {
            (of or model, key): own.histograms[name]
            for (of, key), own in requests.by_client.items()
        }
        yield _histograms(f"pagoda_{name}", kind.help_text, ["model_name", "key"], series)


def _dispatcher(model: str, report: LoadReport) -> Iterator[Metric]:
    """Metrics that include replicas which have not answered."""
    yield _gauge(
        "pagoda_replica_ready",
        "Whether a replica computes.",
        _REPLICA,
        {
            (replica.model or model, replica.name): replica.state == "ready"
            for replica in report.replicas
        },
    )
    yield _counter(
        "pagoda_engine_restarts_total",
        "Engines lost; each is started again, unless too many were lost in a row.",
        _REPLICA,
        {(replica.model or model, replica.name): replica.num_losses for replica in report.replicas},
    )
    yield _gauge(
        "pagoda_num_requests_unplaced",
        "Requests that wait for a replica that takes them.",
        ["model_name"],
        {(model,): num_unplaced(report)},
    )


def _replicas(models: Mapping[str, str], reports: Mapping[str, LoadReport]) -> Iterator[Metric]:
    """Metrics of replicas; `models` has the model of each."""
    for field, figures in figures_of(LoadReport).items():
        own = {(models[name], name): getattr(report, field) for name, report in reports.items()}
        for figure in figures:
            if figure.name and (not figure.label or any(own.values())):
                yield _declared(figure, _REPLICA, own)
    for name, help_text, steps in (
        ("pagoda_step_tokens", "Tokens of a step.", step_tokens),
        ("pagoda_step_sequences", "Requests that take part in a step.", step_sequences),
    ):
        histograms = {
            (models[replica], replica): steps(report) for replica, report in reports.items()
        }
        yield _histograms(name, help_text, _REPLICA, histograms)
    yield _counter(
        "pagoda_step_phase_seconds_total",
        "Where the time of steps went.",
        (*_REPLICA, "phase"),
        {
            (models[replica], replica, phase): getattr(report.steps, field)
            for replica, report in reports.items()
            for phase, field in PHASES.items()
        },
    )
    tiers = {
        (models[name], name, tier.name): tier
        for name, report in reports.items()
        for tier in report.tiers
    }
    usage = {
        (models[name], name, "device"): device_usage(report) for name, report in reports.items()
    }
    usage |= {
        labels: tier.num_blocks / tier.num_total_blocks
        for labels, tier in tiers.items()
        if tier.num_total_blocks
    }
    yield _gauge(
        "pagoda_kv_cache_usage_ratio",
        "The part of a tier's blocks that is in use, from 0 to 1; of the device's, by requests.",
        (*_REPLICA, "tier"),
        usage,
    )
    for field, (figure,) in figures_of(TierLoad).items() if tiers else ():
        series = {labels: getattr(tier, field) for labels, tier in tiers.items()}
        yield _declared(figure, (*_REPLICA, "tier"), series)


def _declared(figure: Figure, labels: Sequence[str], series: Series) -> Metric:
    """The metric of a declared figure; a list has a series for each item."""
    if figure.label:
        labels = (*labels, figure.label)
        series = {(*own, str(i)): item for own, row in series.items() for i, item in enumerate(row)}
    make = _counter if figure.is_counter else _gauge
    return make(f"pagoda_{figure.name}", figure.help_text, labels, series)


# ---- figures of a load report


def reports_of(report: LoadReport) -> dict[str, LoadReport]:
    """The report of each replica that has answered in time."""
    return {
        replica.name: replica.report for replica in report.replicas if replica.report is not None
    }


def num_unplaced(report: LoadReport) -> int:
    if not report.replicas:
        return 0
    return report.num_waiting - sum(own.num_waiting for own in reports_of(report).values())


def device_usage(report: LoadReport) -> float:
    """The share of the KV cache that requests hold, from 0 to 1."""
    return 1 - report.num_free_blocks / report.num_blocks if report.num_blocks else 0.0


def step_tokens(report: LoadReport) -> Histogram:
    return Histogram(STEP_TOKEN_BOUNDS, report.steps.by_tokens, report.steps.num_tokens)


def step_sequences(report: LoadReport) -> Histogram:
    return Histogram(STEP_SEQUENCE_BOUNDS, report.steps.by_sequences, report.steps.num_sequences)


# ---- vLLM's names


def aliases_of(snapshot: Snapshot) -> Iterator[Metric]:
    model, requests = snapshot.model_name, snapshot.requests
    finished = [own.finished for own in requests.by_client.values()]
    reasons = sorted({reason for counts in finished for reason in counts} - {REFUSED})
    yield _counter(
        "vllm:request_success_total",
        "Answers that have ended, by the reason of their end.",
        ["model_name", "finished_reason"],
        {(model, reason): sum(counts[reason] for counts in finished) for reason in reasons},
    )
    for name, own_name in _VLLM_HISTOGRAMS.items():
        help_text = HISTOGRAMS[own_name].help_text
        total = {(model,): requests.total(own_name)}
        yield _histograms(f"vllm:{name}", help_text, ["model_name"], total)
    if snapshot.max_adapters:
        labels = str(snapshot.max_adapters), ",".join(snapshot.adapters), ""
        yield _gauge(
            "vllm:lora_requests_info",
            "Adapters on the device, all of which answer at once; the value is the time.",
            ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            {labels: time.time()},
        )
    if snapshot.report is None:
        return
    reports = reports_of(snapshot.report)
    yield from _engine_aliases(model, reports, num_unplaced(snapshot.report))
    if snapshot.limits is not None:
        block_size = str(snapshot.limits.block_size)
        yield _gauge(
            "vllm:cache_config_info",
            "The size of the KV cache; the value is always 1.",
            ["engine", "block_size", "num_gpu_blocks"],
            {(name, block_size, str(report.num_blocks)): 1 for name, report in reports.items()},
        )


def _engine_aliases(
    model: str, reports: Mapping[str, LoadReport], unplaced: int
) -> Iterator[Metric]:
    aliases: defaultdict[str, list[tuple[str, bool]]] = defaultdict(list)
    for field, figures in figures_of(LoadReport).items():
        for figure in figures:
            for name in figure.vllm:
                if figure.label:
                    counts = {
                        (model, engine, str(place)): count
                        for engine, report in reports.items()
                        for place, count in enumerate(getattr(report, field))
                    }
                    yield _counter(
                        f"vllm:{name}", _VLLM_HELP, [*_VLLM_ENGINE, figure.label], counts
                    )
                else:
                    aliases[name].append((field, figure.is_counter))
    for name, fields in aliases.items():
        values = {
            (model, engine): sum(getattr(report, field) for field, _ in fields)
            for engine, report in reports.items()
        }
        if name == "num_requests_waiting":  # autoscalers add up what waits over all engines
            values[model, ""] = unplaced
        make = _counter if any(is_counter for _, is_counter in fields) else _gauge
        yield make(f"vllm:{name}", _VLLM_HELP, _VLLM_ENGINE, values)
    usage = {(model, engine): device_usage(report) for engine, report in reports.items()}
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        yield _gauge(f"vllm:{name}", _VLLM_HELP, _VLLM_ENGINE, usage)
    tokens = {(model, engine): step_tokens(report) for engine, report in reports.items()}
    yield _histograms("vllm:iteration_tokens_total", "Tokens of a step.", _VLLM_ENGINE, tokens)
