# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of requests, exported in the background by its official SDK.

Attributes are those of the conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/), and those that vLLM has for latencies.
No text of prompts or answers is among them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from pagoda.errors import ConfigError
from pagoda.telemetry.request_tracker import RequestStatistics, RequestTracker
from pagoda.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

_EXPORT_TIMEOUT_S = 5.0
_MAX_WAITING = 2048
"""Most spans in the queue, unless the SDK's variable says otherwise; further spans are lost."""
_CLOSING_S = 2.0
"""Seconds that the last spans may take to be sent at the end."""
_OPERATIONS = {"/v1/chat/completions": "chat"}
_FAILURES = frozenset(("error", "refused", "timeout"))

_log = logging.getLogger(__name__)


class RequestSpans:
    """Makes a span of each answer, as a child of the client's span where the client sent one."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint` takes OTLP over HTTP: the base URL of a collector, or the whole URL for traces.
        Raises ConfigError: `endpoint` is not an HTTP URL, or the SDK is not installed."""
        url = _traces_url(endpoint)
        try:
            from opentelemetry import trace
            from opentelemetry.context import Context
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(
                "--otlp-endpoint needs the OpenTelemetry SDK; install it with pip install 'pagoda-llm[otel]'."
            ) from None
        # The SDK logs every batch that it could not send; `CountingExporter` logs once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create({"service.name": "pagoda", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S)
        given = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
        max_waiting = int(given) if given.isdecimal() and int(given) else _MAX_WAITING
        self.exporter = CountingExporter(exporter, url, max_waiting)
        queue = BatchSpanProcessor(cast("SpanExporter", self.exporter), max_queue_size=max_waiting)
        self._provider.add_span_processor(queue)
        self._tracer = self._provider.get_tracer("pagoda", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._outside = Context()
        """A context without a span: other work of this process is not part of a request."""
        self._model = model
        self._open: dict[str, tuple[Span, int]] = {}
        """Spans of running answers, with the nanoseconds by which the wall clock is ahead of the tracker's."""

    def follow(self, tracker: RequestTracker) -> None:
        tracker.subscribe(on_start=self._start, on_finish=self._finish)

    def _start(self, record: RequestStatistics) -> None:
        """Sets `record.traceparent` and `record.tracestate` to the new span."""
        client = record.client_request
        wall_ns = time.time_ns() - time.perf_counter_ns()
        given = {"traceparent": client.traceparent, "tracestate": client.tracestate}
        carrier = {name: value for name, value in given.items() if value is not None}
        operation = _OPERATIONS.get(client.route, "text_completion")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(carrier, context=self._outside),
            kind=self._trace.SpanKind.SERVER,
            start_time=client.arrived_ns + wall_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "pagoda",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.request.id": record.request_id,
                "gen_ai.request.max_tokens": record.max_tokens,
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            },
        )
        carrier = {}
        self._propagator.inject(
            carrier, context=self._trace.set_span_in_context(span, self._outside)
        )
        record.traceparent = carrier.get("traceparent")
        record.tracestate = carrier.get("tracestate")
        self._open[record.request_id] = span, wall_ns

    def _finish(self, record: RequestStatistics) -> None:
        opened = self._open.pop(record.request_id, None)
        if opened is None or record.ended_ns is None:
            return
        span, wall_ns = opened
        if span.is_recording():
            attributes = _attributes(record)
            span.set_attributes(
                {name: attributes[name] for name in attributes if attributes[name] is not None}
            )
            context = self._trace.set_span_in_context(span, self._outside)
            for name, began_ns, ended_ns in (
                ("queue", record.started_ns, record.admitted_ns),
                ("prefill", record.admitted_ns, record.first_token_ns),
                ("decode", record.first_token_ns, record.last_token_ns),
            ):
                if began_ns is None or ended_ns is None:
                    continue
                phase = self._tracer.start_span(name, context, start_time=began_ns + wall_ns)
                self._end(phase, ended_ns + wall_ns)
            if record.finish_reason in _FAILURES:
                span.set_attribute("error.type", record.finish_reason)
                span.set_status(self._trace.StatusCode.ERROR, record.error)
        self._end(span, record.ended_ns + wall_ns)

    def _end(self, span: Span, at_ns: int) -> None:
        """Ends a span, which queues the span to be sent; counts the span as lost if the queue is full."""
        if span.get_span_context().trace_flags.sampled and self.exporter.enter():
            span.end(at_ns)

    def flush(self) -> None:
        """Sends the spans that are queued; returns when they are sent or lost."""
        self._provider.force_flush()

    def close(self) -> None:
        """Sends the last spans, for at most `_CLOSING_S`."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(_CLOSING_S)
        self.exporter.sum_up()


class CountingExporter:
    """Exports spans and counts them; logs once that some are lost, and how many when spans can be sent again."""

    def __init__(self, inner: SpanExporter, url: str, max_waiting: int) -> None:
        self._inner = inner
        self._url = url
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        """Spans end in the event loop, and are sent by a thread of the SDK."""
        self._num_waiting = 0
        self._num_lost = 0
        self._is_known = False
        """True once the log says that spans are lost."""
        self.shutdown = inner.shutdown
        self.force_flush = inner.force_flush

    def enter(self) -> bool:
        """Counts a span that is queued; False if the queue is full, so that the span is lost."""
        with self._lock:
            if self._num_waiting < self._max_waiting:
                self._num_waiting += 1
                return True
        self._lose(1, f"come faster than {self._url} takes them; some are lost")
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            self._num_waiting -= len(spans)
        result = self._inner.export(spans)
        if result.name != "SUCCESS":
            self._lose(len(spans), f"cannot be sent to {self._url}; those are lost")
            return result
        with self._lock:
            is_over = self._is_known and self._num_waiting < self._max_waiting
            num_lost, self._num_lost = (self._num_lost, 0) if is_over else (0, self._num_lost)
            self._is_known &= not is_over
        if is_over:
            _log.info("spans can be sent to %s again; %d were lost", self._url, num_lost)
        return result

    def sum_up(self) -> None:
        with self._lock:
            num_lost, self._num_lost = self._num_lost + self._num_waiting, 0
        if num_lost:
            _log.warning("%d spans were lost that %s did not take", num_lost, self._url)

    def _lose(self, count: int, why: str) -> None:
        with self._lock:
            is_news, self._is_known = not self._is_known, True
            self._num_lost += count
        if is_news:
            _log.warning("spans %s, all else goes on", why)


def _traces_url(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"--otlp-endpoint must be an HTTP URL such as http://localhost:4318, got {endpoint}."
        )
    return f"{endpoint.rstrip('/')}/v1/traces" if parts.path in ("", "/") else endpoint


def _attributes(record: RequestStatistics) -> dict[str, Any]:
    """The attributes that are known at the end; None where the answer had no such time or key."""
    return {
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.num_output_tokens,
        "gen_ai.response.finish_reasons": (record.finish_reason,),
        "pagoda.key": record.client_request.key_name or None,
        "gen_ai.latency.time_in_queue": record.queue_time_s,
        "gen_ai.latency.time_to_first_token": record.ttft_s,
        "gen_ai.latency.time_in_model_prefill": record.prefill_s,
        "gen_ai.latency.time_in_model_decode": record.decode_s,
        "gen_ai.latency.e2e": record.duration_s,
    }
