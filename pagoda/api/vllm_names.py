"""Figures once more, under the names and labels that vLLM has for the same: its dashboards then work as they are.

What vLLM counts for each engine and Pagoda for each API key, as requests, has no label `engine` here. Names with
colons are not what Prometheus recommends, which is why they are not in `GET /metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    step_tokens,
)
from pagoda.api.metrics import Snapshot
from pagoda.api.request_metrics import HISTOGRAMS
from pagoda.frontend.request_tracker import REFUSED
from pagoda.messages.frontend import EngineReady
from pagoda.messages.load import LoadReport

_PREFIX = "vllm:"
_Value = Callable[[LoadReport], float]

_NO_ENGINE = ""
"""The label of requests that wait for one: whoever scales by what waits adds over engines."""
_GAUGES: dict[str, _Value] = {
    "num_requests_running": lambda report: report.num_running,
    # There, requests that wait for KV are among those that wait.
    "num_requests_waiting": lambda report: report.num_waiting + report.num_awaiting_kv,
    "kv_cache_usage_perc": device_usage,
    "gpu_cache_usage_perc": device_usage,
}
_COUNTERS: dict[str, _Value] = {
    "num_preemptions_total": lambda report: report.num_preemptions,
    "prompt_tokens_total": lambda report: report.num_prompt_tokens,
    "generation_tokens_total": lambda report: report.num_generated_tokens,
    "prefix_cache_queries_total": lambda report: report.num_prompt_tokens,
    "prefix_cache_hits_total": lambda report: report.num_prefix_hit_tokens,
    "gpu_prefix_cache_queries_total": lambda report: report.num_prompt_tokens,
    "gpu_prefix_cache_hits_total": lambda report: report.num_prefix_hit_tokens,
}
_HISTOGRAMS = {
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
"""Theirs, and ours."""


def aliases_of(snapshot: Snapshot) -> Iterator[Metric]:
    """What vLLM has as well."""
    yield from _of_requests(snapshot)
    if snapshot.report is not None:
        yield from _of_engines(snapshot.model_name, snapshot.report)
        if snapshot.limits is not None:
            yield _cache_config(reports_of(snapshot.report), snapshot.limits)


def _of_requests(snapshot: Snapshot) -> Iterator[Metric]:
    success = CounterMetricFamily(
        f"{_PREFIX}request_success_total",
        "Answers that have ended, by the reason of their end.",
        labels=["model_name", "finished_reason"],
    )
    reasons = {reason for counts in snapshot.requests.finished.values() for reason in counts}
    for reason in sorted(reasons - {REFUSED}):
        count = sum(counts[reason] for counts in snapshot.requests.finished.values())
        success.add_metric([snapshot.model_name, reason], count)
    yield success
    for name, own_name in _HISTOGRAMS.items():
        help_text = HISTOGRAMS[own_name].help_text
        family = HistogramMetricFamily(f"{_PREFIX}{name}", help_text, labels=["model_name"])
        add_histogram(family, [snapshot.model_name], snapshot.requests.total(own_name))
        yield family


def _of_engines(model: str, whole: LoadReport) -> Iterator[Metric]:
    labels = ["model_name", "engine"]
    reports = reports_of(whole)
    for family, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, value in table.items():
            metric = family(f"{_PREFIX}{name}", "As vLLM has it.", labels=labels)
            for engine, report in reports.items():
                metric.add_metric([model, engine], value(report))
            if name == "num_requests_waiting":
                metric.add_metric([model, _NO_ENGINE], num_unplaced(whole))
            yield metric
    tokens = HistogramMetricFamily(
        f"{_PREFIX}iteration_tokens_total", "Tokens of a step.", labels=labels
    )
    for engine, report in reports.items():
        add_histogram(tokens, [model, engine], step_tokens(report))
    yield tokens


def _cache_config(reports: dict[str, LoadReport], limits: EngineReady) -> Metric:
    info = GaugeMetricFamily(
        f"{_PREFIX}cache_config_info",
        "The size of the KV cache; the value is always 1.",
        labels=["engine", "block_size", "num_gpu_blocks"],
    )
    for engine, report in reports.items():
        info.add_metric([engine, str(limits.block_size), str(report.num_blocks)], 1)
    return info
