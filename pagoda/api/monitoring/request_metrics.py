# SPDX-License-Identifier: Apache-2.0
"""Counts of requests for `/metrics`, by model and API key, made in the event loop as answers come.

The number of series depends on models, keys, routes, statuses and error codes only, whatever clients send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pagoda.messages.frontend import FinishReason
from pagoda.telemetry.histogram import Histogram, total
from pagoda.telemetry.request_tracker import REFUSED, TIMED_OUT, RequestStatistics, RequestTracker

# The bounds are those of vLLM, so that figures of both can be laid side by side.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(
    float(digit * 10**power) for power in range(7) for digit in (1, 2, 5) if power < 6 or digit == 1
)

FINISH_REASONS = (*(str(reason) for reason in FinishReason), TIMED_OUT, REFUSED)
_COMPLETE = frozenset((str(FinishReason.STOP), str(FinishReason.LENGTH)))


class HistogramKind(NamedTuple):
    help_text: str
    bounds: Sequence[float]


HISTOGRAMS = {
    "time_to_first_token_seconds": HistogramKind(
        "From the arrival of a request to the first token of its answer.", _FIRST_TOKEN_S
    ),
    "inter_token_latency_seconds": HistogramKind(
        "Between a token and the next one; those that come together count once.", _TOKEN_S
    ),
    "request_time_per_output_token_seconds": HistogramKind(
        "The mean time between tokens of an answer, from its first to its last.", _TOKEN_S
    ),
    "request_duration_seconds": HistogramKind(
        "From the arrival of a request to the end of its answer.", _REQUEST_S
    ),
    "request_queue_time_seconds": HistogramKind(
        "How long a request waited before its first step, for an engine and in it.", _REQUEST_S
    ),
    "request_prefill_time_seconds": HistogramKind(
        "From the first step of a request to the first token of its answer.", _REQUEST_S
    ),
    "request_decode_time_seconds": HistogramKind(
        "From the first token of an answer to its last.", _REQUEST_S
    ),
    "request_prompt_tokens": HistogramKind("Tokens of a prompt.", _TOKENS),
    "request_generated_tokens": HistogramKind("Tokens of an answer.", _TOKENS),
}
"""docs/metrics.md says of which requests each of them is."""


class KeyFigures:
    __slots__ = ("finished", "first_token", "histograms", "next_token", "num_tokens")

    def __init__(self) -> None:
        self.histograms = {name: Histogram(kind.bounds) for name, kind in HISTOGRAMS.items()}
        self.first_token = self.histograms["time_to_first_token_seconds"]
        self.next_token = self.histograms["inter_token_latency_seconds"]
        self.num_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)

    def copy(self) -> KeyFigures:
        copied = KeyFigures()
        copied.histograms = {name: own.copy() for name, own in self.histograms.items()}
        copied.num_tokens, copied.finished = self.num_tokens, self.finished.copy()
        return copied

    def end(self, record: RequestStatistics) -> None:
        self.finished[record.finish_reason] += 1
        if record.finish_reason == REFUSED:
            return
        observed = {
            "request_prompt_tokens": record.num_prompt_tokens,
            "request_generated_tokens": record.num_output_tokens,
            "request_queue_time_seconds": record.queue_time_s,
        }
        if record.finish_reason in _COMPLETE:
            observed |= {
                "request_duration_seconds": record.duration_s,
                "request_prefill_time_seconds": record.prefill_s,
                "request_decode_time_seconds": record.decode_s,
                "request_time_per_output_token_seconds": record.itl_s,
            }
        for name, value in observed.items():
            if value is not None:
                self.histograms[name].observe(value)


class Refusal(NamedTuple):
    route: str
    """The path in the table of routes; empty for an unknown path or a request that did not get that far."""
    status: int
    code: str
    """The code of the error object, or another word for the kind of error."""


class RequestMetrics:
    """Counts requests and tokens; listens to a `RequestTracker`."""

    def __init__(self, keys: Sequence[str] = ("",)) -> None:
        """`keys` are the names of those that there are; others may come too."""
        self.by_client = {("", key): KeyFigures() for key in keys}
        """Figures by the model, which is empty for the default one, and the name of the API key."""
        self.refusals: Counter[Refusal] = Counter()

    def follow(self, tracker: RequestTracker) -> None:
        tracker.subscribe(
            on_start=self._on_start, on_tokens=self._on_tokens, on_finish=self._on_finish
        )

    def copy(self) -> RequestMetrics:
        """The figures as they are now, for another thread."""
        copied = RequestMetrics(())
        copied.by_client = {client: own.copy() for client, own in self.by_client.items()}
        copied.refusals = self.refusals.copy()
        return copied

    def total(self, name: str) -> Histogram:
        return total(
            [own.histograms[name] for own in self.by_client.values()], HISTOGRAMS[name].bounds
        )

    def _on_start(self, record: RequestStatistics) -> None:
        client = record.client_request.model, record.client_request.key_name
        if client not in self.by_client:
            self.by_client[client] = KeyFigures()

    def _on_tokens(
        self, record: RequestStatistics, num_tokens: int, waited_ns: int, is_first: bool
    ) -> None:
        figures = self.by_client[record.client_request.model, record.client_request.key_name]
        figures.num_tokens += num_tokens
        histogram = figures.first_token if is_first else figures.next_token
        histogram.observe(waited_ns / 1e9)

    def _on_finish(self, record: RequestStatistics) -> None:
        self.by_client[record.client_request.model, record.client_request.key_name].end(record)
