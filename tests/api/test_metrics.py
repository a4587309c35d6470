# SPDX-License-Identifier: Apache-2.0
"""`/metrics`: what it counts, under which names, and that Prometheus' own tools take it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from debian_programs import debian_program
from metrics_text import names, series, value
from prometheus_client.parser import text_string_to_metric_families

from pagoda.api.auth.keys import ApiKeys
from pagoda.api.monitoring.request_metrics import HISTOGRAMS, RequestMetrics
from pagoda.errors import EngineDeadError, OverloadedError
from pagoda.fleet.adapters import AdapterRegistry
from pagoda.messages.adapters import Adapter
from pagoda.messages.frontend import TokenChunk
from pagoda.messages.load import (
    STEP_TOKEN_BOUNDS,
    LoadReport,
    ProcessMemory,
    ReplicaLoad,
    StepTotals,
    TierLoad,
)
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.request_tracker import ClientRequest, RequestStatistics, RequestTracker

TIERS = (
    TierLoad(name="host", num_blocks=3, num_total_blocks=8, num_stored=5, num_removed=2),
    TierLoad(
        name="disk", num_blocks=0, num_total_blocks=90, num_loaded=6, num_failed=1, is_indexed=False
    ),
)


async def scrape(api: Any, path: str = "/metrics") -> str:
    answer = await api.get(path, headers={"Authorization": "Bearer a"})
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.body.decode()


def report_with(api: Any, replicas: Sequence[ReplicaLoad] = (), **fields: Any) -> Any:
    """Makes the endpoint report `fields` of replica 0, and other replicas."""
    own = LoadReport(**fields)
    first = ReplicaLoad(name="0", state="ready", num_requests=0, weighed_tokens=0, report=own)
    api.endpoint.report = msgspec.structs.replace(own, replicas=(first, *replicas))
    return api.endpoint.report


def full_report(api: Any) -> None:
    """Makes replica 0 report everything. Replica 1 is starting, after two losses of its engine."""
    counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
    counts[0], counts[2] = 3, 1
    report_with(
        api,
        [ReplicaLoad(name="1", state="starting", num_requests=0, weighed_tokens=0, num_losses=2)],
        num_prompt_tokens=7,
        num_generated_tokens=9,
        num_blocks_stored=5,
        num_blocks_removed=3,
        num_blocks=8,
        num_free_blocks=6,
        num_awaiting_kv=4,
        tiers=TIERS,
        steps=StepTotals(15, 5, counts, [3, 1], 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),
        expert_tokens=[4, 9],
        expert_rank_tokens=[4, 9],
        processes=(ProcessMemory("engine dp0", 11, 2**20),),
    )


# ---- what replicas report

REPORTED = [
    ("replica_ready", {"replica": "0"}, 1),
    ("replica_ready", {"replica": "1"}, 0),
    ("engine_restarts_total", {"replica": "0"}, 0),
    ("engine_restarts_total", {"replica": "1"}, 2),
    ("prefix_cache_queries_total", {"model_name": "tiny", "replica": "0"}, 7),
    ("generated_tokens_total", {"replica": "0"}, 9),
    ("kv_blocks_stored_total", {"replica": "0"}, 5),
    ("kv_blocks_removed_total", {"replica": "0"}, 3),
    ("kv_cache_usage_ratio", {"tier": "device"}, 0.25),
    ("kv_cache_usage_ratio", {"tier": "host"}, 0.375),
    ("num_requests_awaiting_kv", {"replica": "0"}, 4),
    ("step_tokens_count", {}, 4),
    ("step_tokens_sum", {}, 15),
    ("step_sequences_count", {}, 4),
    ("step_sequences_sum", {}, 5),
    ("process_resident_memory_bytes", {"process": "engine dp0", "replica": "0"}, 2**20),
]
TIER_FIGURES = {
    "blocks": (3, 0),
    "capacity_blocks": (8, 90),
    "indexed": (1, 0),
    "blocks_stored_total": (5, 0),
    "blocks_removed_total": (2, 0),
    "blocks_loaded_total": (0, 6),
    "blocks_failed_total": (0, 1),
}


async def test_what_replicas_report(api) -> None:
    full_report(api)
    text = await scrape(api)
    for name, labels, expected in REPORTED:
        assert value(text, f"pagoda_{name}", **labels) == expected, (name, labels)
    for name, figures in TIER_FIGURES.items():
        for tier, expected in zip(("host", "disk"), figures, strict=True):
            assert value(text, f"pagoda_kv_tier_{name}", replica="0", tier=tier) == expected
    for name, label in (("expert", "expert"), ("expert_rank", "rank")):
        found = series(text, f"pagoda_{name}_tokens_total")
        assert [(labels[label], count) for labels, count in found] == [("0", 4), ("1", 9)]
    assert [labels["replica"] for labels, _ in series(text, "pagoda_num_requests_running")] == ["0"]
    buckets = {labels["le"]: count for labels, count in series(text, "pagoda_step_tokens_bucket")}
    assert [buckets[bound] for bound in ("1.0", "8.0", "16.0", "+Inf")] == [3, 3, 4, 4]
    phases = series(text, "pagoda_step_phase_seconds_total")
    assert [seconds for _, seconds in phases] == [1, 2, 3, 4, 5, 6, 7, 8]
    own = value(text, "pagoda_process_resident_memory_bytes", process="frontend", replica="")
    assert own > 2**20


async def test_what_a_replica_lacks_has_no_series(api) -> None:
    report_with(api)
    text = await scrape(api)
    assert "expert" not in text
    assert "kv_tier" not in text


async def test_the_load_as_json(api) -> None:
    full_report(api)
    load = (await api.get("/v1/load")).json()
    assert load["steps"]["num_tokens"] == 15
    assert load["processes"] == [{"role": "engine dp0", "pid": 11, "resident_bytes": 2**20}]
    disk = load["tiers"][1]
    assert (disk["name"], disk["num_total_blocks"], disk["is_indexed"]) == ("disk", 90, False)


async def test_requests_are_counted_also_while_there_is_no_engine(serve_api) -> None:
    api = await serve_api(loading=True)
    assert (await api.complete()).status == 503
    text = await scrape(api)
    assert value(text, "pagoda_http_errors_total", status="503", route="/v1/completions") == 1
    assert "pagoda_replica_ready" not in text
    api = await serve_api()

    async def load() -> LoadReport:
        raise EngineDeadError("It ended.")

    api.endpoint.load = load
    assert value(await scrape(api), "pagoda_requests_total", finish_reason="stop") == 0


# ---- what clients get


async def test_answers_are_counted_by_key_and_reason(serve_api) -> None:
    api = await serve_api("hello", api_keys=ApiKeys(["alice:=a", "b"]))
    alice, second = ({"Authorization": f"Bearer {key}"} for key in "ab")
    assert (await api.chat()).status == 401
    await api.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}, headers=alice)
    await api.post("/v1/completions", {"prompt": ["hi", "you"]}, headers=second)
    api.endpoint.raises = OverloadedError("The waiting queue is full.")
    refused = await api.post("/v1/completions", {"prompt": "hi"}, headers=second)
    assert refused.status == 429
    text = await scrape(api)
    for name, labels, expected in (
        ("requests_total", {"key": "alice", "finish_reason": "length"}, 1),
        ("requests_total", {"key": "alice", "finish_reason": "stop"}, 0),
        ("requests_total", {"key": "key2", "finish_reason": "stop"}, 2),
        ("requests_total", {"key": "key2", "finish_reason": "refused"}, 1),
        ("request_generated_tokens_sum", {"key": "alice"}, 2),
        ("request_prompt_tokens_count", {"key": "key2"}, 2),
        ("time_to_first_token_seconds_count", {"key": "key2"}, 2),
        ("inter_token_latency_seconds_count", {"key": "alice"}, 1),
        ("request_duration_seconds_count", {"key": "key2"}, 2),
    ):
        assert value(text, f"pagoda_{name}", **labels) == expected, (name, labels)
    errors = {tuple(labels.values()): n for labels, n in series(text, "pagoda_http_errors_total")}
    assert errors == {
        ("invalid_api_key", "/v1/chat/completions", "401"): 1,
        ("queue_full", "/v1/completions", "429"): 1,
    }


def followed(
    now_ns: list[int], keys: Sequence[str] = ("",)
) -> tuple[RequestMetrics, RequestTracker]:
    """Metrics that follow a tracker, whose clock shows the one item of `now_ns`."""
    metrics, tracker = RequestMetrics(keys), RequestTracker(lambda: now_ns[0])
    metrics.follow(tracker)
    return metrics, tracker


def started(
    tracker: RequestTracker, name: str = "a", *, arrived_ns: int = 0, key_name: str = ""
) -> RequestStatistics:
    client_request = ClientRequest(id=name, arrived_ns=arrived_ns, key_name=key_name)
    return tracker.start(name, client_request, num_prompt_tokens=5, max_tokens=9)


def test_times_are_those_of_the_tracker() -> None:
    now_ns = [0]
    metrics, tracker = followed(now_ns)

    def at(seconds: int) -> None:
        now_ns[0] = seconds * 10**9

    at(2)
    record = started(tracker, arrived_ns=10**9)
    record.queue_time_s = 0.5
    for seconds in (4, 6, 9):
        at(seconds)
        tracker.add_tokens(record, 1)
    at(10)
    tracker.finish(record, "stop")
    sums = {name: metrics.total(name).sum for name in HISTOGRAMS}
    assert sums == {
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 5,
        "request_time_per_output_token_seconds": 2.5,
        "request_duration_seconds": 9,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "request_decode_time_seconds": 5,
        "request_prompt_tokens": 5,
        "request_generated_tokens": 3,
    }
    assert sum(metrics.total("inter_token_latency_seconds").counts) == 2


def test_what_gives_up_in_the_queue_has_waited() -> None:
    now_ns = [0]
    metrics, tracker = followed(now_ns)
    for name, reason in (("a", "abort"), ("b", "abort"), ("c", "refused")):
        record = started(tracker, name, arrived_ns=now_ns[0])
        if name == "b":  # its prompt is being computed
            tracker.on_chunk(
                record, TokenChunk(name, [], num_computed_tokens=1, queue_time_s=2.0), 0
            )
        now_ns[0] += 5 * 10**9
        tracker.finish(record, reason)
    queue = metrics.total("request_queue_time_seconds")
    assert (sum(queue.counts), queue.sum) == (2, 7.0)


def test_what_waits_without_a_token_is_seen_while_it_waits() -> None:
    now_ns = [0]
    tracker = RequestTracker(lambda: now_ns[0])
    assert tracker.longest_wait_ns() == 0
    records = [started(tracker, name, arrived_ns=at) for name, at in (("late", 3), ("early", 1))]
    now_ns[0] = 10
    assert tracker.longest_wait_ns() == 9
    tracker.add_tokens(records[1], 1)
    assert tracker.longest_wait_ns() == 7
    tracker.finish(records[0], "abort")
    assert tracker.longest_wait_ns() == 0


def test_an_answer_that_was_broken_off_has_tokens_and_no_duration() -> None:
    metrics, tracker = followed([1], ["alice", "bob"])
    record = started(tracker, key_name="alice")
    tracker.add_tokens(record, 2)
    tracker.add_tokens(record, 1)
    assert {key: own.num_tokens for (_, key), own in metrics.by_client.items()} == {
        "alice": 3,
        "bob": 0,
    }
    tracker.finish(record, "abort")
    assert metrics.by_client["", "alice"].finished["abort"] == 1
    assert metrics.total("request_generated_tokens").sum == 3
    assert metrics.total("request_duration_seconds").sum == 0


async def test_what_clients_send_makes_no_series(api) -> None:
    before = len((await scrape(api)).splitlines())
    for index in range(20):
        await api.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " + b"x" * 20000 + b"\r\n\r\n")
        assert (await api.get(f"/nowhere/{index}")).status == 404
        assert (await api.get(f"/v1/models/{index}")).status == 404
        assert (await api.complete(model=f"model-{index}")).status == 404
        assert (await api.request(("PUT", "PATCH")[index % 2], "/v1/models")).status == 405
    text = await scrape(api)
    found = [tuple(labels.values()) for labels, _ in series(text, "pagoda_http_errors_total")]
    assert sorted(found) == [
        ("headers_too_long", "", "431"),
        ("method_not_allowed", "/v1/models", "405"),
        ("model_not_found", "/v1/completions", "404"),
        ("model_not_found", "/v1/models/*", "404"),
        ("not_found", "", "404"),
    ]
    assert len(text.splitlines()) == before + 5


async def test_bad_requests_are_counted_by_their_kind(api) -> None:
    codes = {
        b"{": "invalid_json",
        b'{"prompt": "hi", "secret": 1}': "unknown_field",
        b'{"prompt": "hi", "prompt": "hi"}': "duplicate_field",
        b"{}": "missing_field",
        b'{"prompt": "hi", "suffix": "x"}': "not_supported",
        b'{"prompt": "hi", "temperature": -1}': "invalid_value",
        b'{"prompt": "hi", "max_tokens": 9999}': "context_length_exceeded",
    }
    for body in codes:
        answer = await api.post("/v1/completions", body)
        assert answer.status == 400
        assert answer.error()["code"] in (None, "context_length_exceeded")
    found = series(await scrape(api), "pagoda_http_errors_total")
    counts = {labels["code"]: count for labels, count in found}
    assert counts == dict.fromkeys(codes.values(), 1)


async def test_answers_that_a_refusal_ends_are_refused(api) -> None:
    inner = api.endpoint.generate
    calls = 0

    async def generate(request: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OverloadedError("The waiting queue is full.")
        async for chunk in inner(request):
            yield chunk

    api.endpoint.generate = generate
    api.endpoint.pause_after = 0
    assert (await api.complete(n=3)).status == 429
    text = await scrape(api, "/metrics/vllm")
    assert value(text, "pagoda_requests_total", finish_reason="refused") == 3
    assert sum(count for _, count in series(text, "vllm:request_success_total")) == 0


# ---- names


async def test_the_names_of_vllm_where_others_look_for_them(serve_api) -> None:
    api = await serve_api(vllm_metrics=True)
    assert "vllm:num_requests_running" in await scrape(api, "/metrics")
    api = await serve_api()
    assert "vllm:" not in await scrape(api, "/metrics")


async def test_the_names_of_vllm(serve_api) -> None:
    api = await serve_api("hello", api_keys=ApiKeys(["a", "b"]))
    for key in "ab":
        headers = {"Authorization": f"Bearer {key}"}
        await api.post("/v1/completions", {"prompt": "hi", "max_tokens": 3}, headers=headers)
    fields = {"num_waiting": 2, "num_awaiting_kv": 1, "num_blocks": 8, "num_free_blocks": 2}
    whole = report_with(api, **fields)
    # Four of six waiting requests are at no replica.
    api.endpoint.report = msgspec.structs.replace(whole, num_waiting=6)
    text = await scrape(api, "/metrics/vllm")
    engine = {"model_name": "tiny", "engine": "0"}
    assert value(text, "vllm:num_requests_waiting", **engine) == 3
    assert value(text, "vllm:num_requests_waiting", model_name="tiny", engine="") == 4
    assert value(text, "vllm:kv_cache_usage_perc", **engine) == 0.75
    assert value(text, "vllm:e2e_request_latency_seconds_count", model_name="tiny") == 2
    assert value(text, "vllm:time_per_output_token_seconds_count") == 4
    assert value(text, "vllm:request_success_total", finished_reason="length") == 2
    assert value(text, "vllm:cache_config_info", block_size="16", num_gpu_blocks="8") == 1
    ours = names(await scrape(api))
    assert names(text) - ours == {name for name in names(text) if name.startswith("vllm:")}
    assert ours <= names(text)


async def test_endpoint_pickers_of_others_find_what_they_read(serve_api) -> None:
    """llm-d's picker takes the first series of a name that has no time stamp, and these names and labels
    (pkg/epp/framework/plugins/datalayer/extractor/metrics of llm-d/llm-d-inference-scheduler at 2bfffd0d)."""
    api = await serve_api(vllm_metrics=True)
    adapter = Adapter("sums", "/sums", "1")
    known = AdapterRegistry(WorkerConfig(model="m", adapters=(adapter,)))
    api.service.fleet = SimpleNamespace(adapters=known, is_router=False)
    api.endpoint.report = report_with(api, num_waiting=2, num_running=3, num_blocks=8)
    families = {one.name: one for one in text_string_to_metric_families(await scrape(api))}
    first = {name: family.samples[0] for name, family in families.items() if family.samples}
    for name, expected in {
        "num_requests_waiting": 2,
        "num_requests_running": 3,
        "kv_cache_usage_perc": 1,
        "gpu_cache_usage_perc": 1,
    }.items():
        assert first[f"vllm:{name}"].value == expected, name
    cache = first["vllm:cache_config_info"].labels
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "8")
    assert first["vllm:lora_requests_info"].labels == {
        "max_lora": "1",
        "running_lora_adapters": "sums",
        "waiting_lora_adapters": "",
    }


VLLM_DASHBOARD = """
num_requests_running num_requests_waiting num_preemptions_total
kv_cache_usage_perc gpu_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
prompt_tokens_total generation_tokens_total iteration_tokens_total_bucket request_success_total
time_to_first_token_seconds_bucket time_per_output_token_seconds_bucket
inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_prompt_tokens_bucket request_generation_tokens_bucket
"""


async def test_what_dashboards_for_vllm_ask_for_is_there(api) -> None:
    full_report(api)
    text = await scrape(api, "/metrics/vllm")
    for name in VLLM_DASHBOARD.split():
        found = series(text, f"vllm:{name}")
        assert found, name
        assert all(labels["model_name"] == "tiny" for labels, _ in found)


async def test_prometheus_has_no_complaint(serve_api) -> None:
    api = await serve_api("hello")
    full_report(api)
    await asyncio.gather(api.complete(), api.chat(), api.get("/nowhere"))
    assert await _complaints(await scrape(api)) == []
    complaints = await _complaints(await scrape(api, "/metrics/vllm"))
    assert all(line.startswith("vllm:") for line in complaints)
    assert {line.partition(" ")[2] for line in complaints} == {
        "metric names should not contain ':'",
        'non-counter metrics should not have "_total" suffix',
    }


async def _complaints(text: str) -> list[str]:
    promtool = debian_program("promtool", package="prometheus")
    check = await asyncio.to_thread(
        subprocess.run,
        [promtool, "check", "metrics"],
        input=text.encode(),
        capture_output=True,
        timeout=30,
    )
    assert check.returncode in (0, 3), check.stderr
    return check.stderr.decode().splitlines() + check.stdout.decode().splitlines()
