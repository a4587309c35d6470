"""Parts of what is told to Prometheus that it is told under several names."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily

from pagoda.messages.load import STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, LoadReport
from pagoda.telemetry.histogram import Histogram


def add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram
) -> None:
    """Adds a series, whose buckets count all values up to their bounds."""
    buckets, so_far = [], 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        so_far += count
        buckets.append(("+Inf" if math.isinf(bound) else str(float(bound)), float(so_far)))
    family.add_metric(labels, buckets, histogram.sum)


def reports_of(report: LoadReport) -> dict[str, LoadReport]:
    """By replica, of those that answered in time."""
    return {
        replica.name: replica.report for replica in report.replicas if replica.report is not None
    }


def num_unplaced(report: LoadReport) -> int:
    """Requests that wait, and no replica has them."""
    if not report.replicas:
        return 0
    return report.num_waiting - sum(own.num_waiting for own in reports_of(report).values())


def device_usage(report: LoadReport) -> float:
    """The part of the KV cache that requests hold, from 0 to 1."""
    return 1 - report.num_free_blocks / report.num_blocks if report.num_blocks else 0.0


def step_tokens(report: LoadReport) -> Histogram:
    """How many steps had how many tokens."""
    return _histogram(STEP_TOKEN_BOUNDS, report.steps.by_tokens, report.steps.num_tokens)


def step_sequences(report: LoadReport) -> Histogram:
    """How many steps had how many requests."""
    return _histogram(STEP_SEQUENCE_BOUNDS, report.steps.by_sequences, report.steps.num_sequences)


def _histogram(bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
    histogram = Histogram(bounds)
    histogram.counts[: len(counts)] = counts
    histogram.sum = total
    return histogram
