"""Metric families of Prometheus' library, and figures that `/metrics` shows under several names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pagoda.messages.load import STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, LoadReport
from pagoda.telemetry.histogram import Histogram

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
    """Steps by their number of tokens."""
    return _histogram(STEP_TOKEN_BOUNDS, report.steps.by_tokens, report.steps.num_tokens)


def step_sequences(report: LoadReport) -> Histogram:
    """Steps by their number of requests."""
    return _histogram(STEP_SEQUENCE_BOUNDS, report.steps.by_sequences, report.steps.num_sequences)


def _histogram(bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
    histogram = Histogram(bounds)
    histogram.counts[: len(counts)] = counts
    histogram.sum = total
    return histogram
