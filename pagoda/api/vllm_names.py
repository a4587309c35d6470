"""Metrics under the names and labels that vLLM has for the same, so that its dashboards work as they are.

What vLLM counts for each engine and Pagoda for each API key, as requests, has no label `engine` here. Names with
colons are not what Prometheus recommends, which is why they are not in `GET /metrics`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pagoda.api.metric_series import (
    device_usage,
    family,
    histograms,
    num_unplaced,
    reports_of,
    step_tokens,
)
from pagoda.api.metrics import Snapshot
from pagoda.api.request_metrics import HISTOGRAMS
from pagoda.frontend.request_tracker import REFUSED
from pagoda.messages.figures import figures_of
from pagoda.messages.frontend import EngineReady
from pagoda.messages.load import LoadReport

_PREFIX = "vllm:"
_HELP = "As vLLM has it."
_ENGINE = ("model_name", "engine")
_NO_ENGINE = ""
"""The label of requests that wait for an engine. Autoscalers add up what waits over all engines."""
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
"""Pagoda's name of each histogram of vLLM."""


def aliases_of(snapshot: Snapshot) -> Iterator[Metric]:
    """Metrics that vLLM has too."""
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
        f"{_PREFIX}request_success_total",
        "Answers that have ended, by the reason of their end.",
        ["model_name", "finished_reason"],
        [
            ([snapshot.model_name, reason], sum(counts[reason] for counts in finished))
            for reason in reasons
        ],
    )
    for name, own_name in _HISTOGRAMS.items():
        help_text = HISTOGRAMS[own_name].help_text
        total = snapshot.requests.total(own_name)
        series = [([snapshot.model_name], total)]
        yield histograms(f"{_PREFIX}{name}", help_text, ["model_name"], series)


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
        yield family(kind, f"{_PREFIX}{name}", _HELP, _ENGINE, series)
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        usage = [([model, engine], device_usage(report)) for engine, report in reports.items()]
        yield family(GaugeMetricFamily, f"{_PREFIX}{name}", _HELP, _ENGINE, usage)
    tokens = [([model, engine], step_tokens(report)) for engine, report in reports.items()]
    yield histograms(f"{_PREFIX}iteration_tokens_total", "Tokens of a step.", _ENGINE, tokens)


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
        f"{_PREFIX}cache_config_info",
        "The size of the KV cache; the value is always 1.",
        ["engine", "block_size", "num_gpu_blocks"],
        [
            ([engine, str(limits.block_size), str(report.num_blocks)], 1)
            for engine, report in reports.items()
        ],
    )
