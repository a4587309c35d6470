# SPDX-License-Identifier: Apache-2.0
"""Spans as a collector gets them."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from linked_hosts import Host, Router
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from scripted_endpoint import TEXT, ScriptedEndpoint

from pagoda.errors import ConfigError, OverloadedError
from pagoda.messages.sampling_params import SamplingParams
from pagoda.telemetry import request_spans
from pagoda.telemetry.request_spans import RequestSpans
from pagoda.telemetry.request_tracker import ClientRequest, RequestStatistics, RequestTracker
from pagoda.text.draft import Draft
from pagoda.text.text_generator import TextGenerator

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
SECOND = 10**9


class Collector:
    """Takes OTLP over HTTP, as a collector does."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}

    async def take(self, http: web.BaseRequest) -> web.StreamResponse:
        assert http.path == "/v1/traces"
        for group in ExportTraceServiceRequest.FromString(await http.read()).resource_spans:
            self.resource = values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += scope.spans
        return web.Response(body=b"")

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def requests(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        if kind == "array_value":
            value = [item.string_value for item in value.values]
        found[attribute.key] = value
    return found


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    runner = web.ServerRunner(web.Server(collector.take))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield collector
    await runner.cleanup()
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET)


class Rig:
    """A generator whose answers a collector gets as spans."""

    def __init__(self, url: str, model: str = "tiny", endpoint: Any = None) -> None:
        self.spans = RequestSpans(url, model)
        self.tracker = RequestTracker()
        self.spans.follow(self.tracker)
        self.endpoint = endpoint or ScriptedEndpoint("hello")
        self.texts = TextGenerator(self.endpoint, TEXT, self.tracker)

    def request(self, name: str, **fields: Any) -> ClientRequest:
        return ClientRequest(id=name, arrived_ns=self.tracker.clock_ns(), **fields)

    async def ask(self, traceparent: str | None = None, **fields: Any) -> None:
        client_request = self.request("req-1", traceparent=traceparent, **fields)
        [request] = await self.texts.prepare(
            "hi", SamplingParams(max_tokens=3), Draft(client_request=client_request)
        )
        async for _ in self.texts.stream(request):
            pass

    async def ask_and_close(self, traceparent: str | None = None, **fields: Any) -> str:
        """The traceparent that the engine was given."""
        await self.ask(traceparent, **fields)
        await self.close()
        return self.endpoint.requests[0].traceparent or ""

    def start(self, name: str = "a") -> RequestStatistics:
        return self.tracker.start(name, self.request(name), num_prompt_tokens=2, max_tokens=3)

    async def close(self) -> None:
        await asyncio.to_thread(self.spans.close)


@pytest.fixture
def rig(collector: Collector) -> Rig:
    return Rig(collector.url)


async def test_a_request_is_a_part_of_the_clients_span(collector: Collector, rig: Rig) -> None:
    rig.endpoint.num_cached_tokens = 1
    given = await rig.ask_and_close(PARENT, route="/v1/chat/completions", key_name="alice")
    [span] = collector.requests()
    assert span.name == "chat tiny"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert given == f"00-{TRACE_ID}-{span.span_id.hex()}-01"
    assert collector.resource["service.name"] == "pagoda"
    found = values(span.attributes)
    assert found.pop("gen_ai.request.id").startswith("req-1-")
    first_token_s = found.pop("gen_ai.latency.time_to_first_token")
    decode_s = found.pop("gen_ai.latency.time_in_model_decode")
    e2e_s = found.pop("gen_ai.latency.e2e")
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pagoda",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "pagoda.key": "alice",
    }
    assert 0 < first_token_s <= e2e_s - decode_s
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(e2e_s * SECOND)
    assert span.status.code == Status.STATUS_CODE_UNSET


async def test_what_comes_along_with_the_clients_span_goes_on(
    collector: Collector, rig: Rig
) -> None:
    await rig.ask(PARENT, tracestate="a=1,b=2")
    await rig.ask()
    await rig.close()
    assert [request.tracestate for request in rig.endpoint.requests] == ["a=1,b=2", None]
    assert [span.trace_state for span in collector.requests()] == ["a=1,b=2", ""]


async def test_phases_lie_in_their_request(collector: Collector) -> None:
    rig = Rig(f"{collector.url}/v1/traces")
    record = rig.start()
    record.queue_time_s = 1e-9
    for _ in range(2):
        rig.tracker.add_tokens(record, 1)
    rig.tracker.finish(record, "stop")
    await rig.close()
    [whole] = collector.requests()
    phases = [collector.named(name)[0] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent_span_id == whole.span_id for phase in phases)
    edges = [whole.start_time_unix_nano, *(phase.start_time_unix_nano for phase in phases)]
    edges += [phases[-1].end_time_unix_nano, whole.end_time_unix_nano]
    assert edges == sorted(edges)
    assert phases[0].end_time_unix_nano == phases[1].start_time_unix_nano
    assert "gen_ai.latency.time_in_model_prefill" in values(whole.attributes)


async def test_a_request_that_ends_in_the_queue_has_waited(collector: Collector, rig: Rig) -> None:
    rig.tracker.clock_ns = iter((0, 0, SECOND)).__next__
    rig.tracker.finish(rig.start(), "abort")
    await rig.close()
    [queue], [whole] = collector.named("queue"), collector.requests()
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == SECOND
    assert values(whole.attributes)["gen_ai.latency.time_in_queue"] == 1.0


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        "nonsense",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID.upper()}x-{SPAN_ID}-01",
        "00-" + "é" * 32 + f"-{SPAN_ID}-01",
    ],
)
async def test_what_names_no_span_begins_a_trace(
    collector: Collector, rig: Rig, traceparent: str | None
) -> None:
    given = await rig.ask_and_close(traceparent)
    [span] = collector.requests()
    assert span.parent_span_id == b""
    assert span.trace_id.hex() != TRACE_ID
    assert given.startswith(f"00-{span.trace_id.hex()}-{span.span_id.hex()}-")


async def test_a_client_that_does_not_want_its_trace_recorded_is_heard(
    collector: Collector, rig: Rig
) -> None:
    given = await rig.ask_and_close(f"00-{TRACE_ID}-{SPAN_ID}-00")
    assert collector.spans == []
    assert (given[:36], given[-3:]) == (f"00-{TRACE_ID}-", "-00")


async def test_failures_are_marked(collector: Collector, rig: Rig) -> None:
    rig.endpoint.breaks_after = 1
    await rig.ask()
    rig.endpoint.raises = OverloadedError("The waiting queue is full.")
    with pytest.raises(OverloadedError):
        await rig.ask()
    await rig.close()
    assert [
        (span.status.code, span.status.message, values(span.attributes)["error.type"])
        for span in collector.requests()
    ] == [
        (Status.STATUS_CODE_ERROR, "It broke.", "error"),
        (Status.STATUS_CODE_ERROR, "The waiting queue is full.", "refused"),
    ]


async def test_the_span_of_the_router_is_the_parent_of_that_of_the_host(
    collector: Collector,
) -> None:
    router, below = Router(), Rig(collector.url, "host")
    host = Host(below.endpoint, tracker=below.tracker)
    host.join(router)
    above = Rig(collector.url, "router", router.dispatcher)
    try:
        await router.until_hosts(1)
        await above.ask(PARENT)
    finally:
        await host.close()
        await router.close()
    await above.close()
    await below.close()
    [outer] = collector.named("text_completion router")
    [inner] = collector.named("text_completion host")
    assert outer.parent_span_id.hex() == SPAN_ID
    assert inner.parent_span_id == outer.span_id
    assert inner.trace_id == outer.trace_id
    assert values(inner.attributes)["gen_ai.usage.output_tokens"] == 3
    assert (below.endpoint.requests[0].traceparent or "").split("-")[2] == inner.span_id.hex()


async def test_a_collector_that_is_not_there_harms_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_spans, "_EXPORT_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    rig = Rig(url)
    for _ in range(3):
        await rig.ask()
        await asyncio.to_thread(rig.spans.flush)
    await rig.close()
    assert len(rig.endpoint.requests) == 3
    assert [(line.levelname, line.getMessage()) for line in caplog.records] == [
        ("WARNING", f"spans cannot be sent to {url}/v1/traces; those are lost, all else goes on"),
        ("WARNING", f"6 spans were lost that {url}/v1/traces did not take"),
    ]


async def test_spans_that_come_too_fast_are_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    rig = Rig(collector.url)
    go_on, export = threading.Event(), rig.spans.exporter.export

    def export_later(batch: Any) -> Any:
        go_on.wait(10)
        return export(batch)

    monkeypatch.setattr(rig.spans.exporter, "export", export_later)
    for index in range(5):  # a request and its queue each
        rig.tracker.finish(rig.start(str(index)), "abort")
    go_on.set()
    await rig.close()
    assert len(collector.spans) == 2
    texts = [line.getMessage() for line in caplog.records if line.name.startswith("pagoda")]
    url = f"{collector.url}/v1/traces"
    assert texts == [
        f"spans come faster than {url} takes them; some are lost, all else goes on",
        f"spans can be sent to {url} again; 8 were lost",
    ]


@pytest.mark.parametrize(
    "endpoint", ["", "localhost:4318", "ftp://host", "http://", "http://[", "http://host:99999"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint must be an HTTP URL"):
        RequestSpans(endpoint, "tiny")


def test_without_the_sdk_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'pagoda-llm\[otel\]'"):
        RequestSpans("http://localhost:4318", "tiny")


def test_the_sdk_is_imported_by_those_who_ask_only() -> None:
    code = (
        "import sys, pagoda.cli.serve, pagoda.plugins.router.command\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'prometheus_client'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
