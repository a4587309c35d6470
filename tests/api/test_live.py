"""What pages are shown of a server, and how an answer is ended from outside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from linked_hosts import until

from pagoda.api import live_stats
from pagoda.api.keys import ApiKeys
from pagoda.messages.frontend import StepBin, StepStatistics
from pagoda.messages.load import LoadReport, ReplicaLoad, TierLoad


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    monkeypatch.setattr(live_stats, "INTERVAL_S", 0.01)


@asynccontextmanager
async def watching(api, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    asking = api.session.get(f"{api.url}/v1/live", headers=headers)
    async with asyncio.timeout(20), asking as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")

        async def snapshots() -> AsyncIterator[dict[str, Any]]:
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

        yield snapshots()


# ---- snapshots


async def test_a_snapshot_says_all_of_a_server(api) -> None:
    tier = TierLoad(name="host", num_blocks=3, num_total_blocks=8, is_indexed=False)
    own = LoadReport(
        num_running=2,
        num_waiting=1,
        num_awaiting_kv=4,
        num_blocks=64,
        num_free_blocks=40,
        num_cached_blocks=10,
        num_prompt_tokens=200,
        num_prefix_hit_tokens=50,
        num_preemptions=3,
        num_worker_restarts=1,
        step_time_s=0.012,
        tiers=(tier,),
    )
    ready = ReplicaLoad(name="0", state="ready", num_requests=2, weighed_tokens=9, report=own)
    gone = ReplicaLoad(name="1", state="starting", num_requests=0, weighed_tokens=0)
    api.endpoint.report = msgspec.structs.replace(own, replicas=(ready, gone))
    async with watching(api) as snapshots:
        told = await anext(snapshots)
    assert told["started"] == api.service.created
    assert told["is_router"] is False
    assert (told["draining"], told["ttft_ms"], told["itl_ms"]) == (False, None, None)
    assert (told["num_running"], told["num_waiting"], told["num_awaiting_kv"]) == (2, 1, 4)
    rates = ("prompt_tokens_per_s", "output_tokens_per_s", "prefix_hit_rate")
    assert [told[name] for name in rates] == [None, None, None], "nothing came before"
    assert (told["num_preemptions"], told["num_restarts"], told["num_replicas"]) == (3, 1, 2)
    device, host = told["tiers"]
    assert [device[name] for name in ("num_total", "num_used", "num_cached")] == [64, 24, 10]
    assert (host["name"], host["num_cached"], host["is_indexed"]) == ("host", 3, False)
    first, second = told["replicas"]
    assert (first["num_waiting"], first["step_time_ms"]) == (5, 12.0)
    assert [first[f"num_{kind}blocks"] for kind in ("", "used_", "cached_")] == [64, 24, 10]
    assert (second["state"], second["num_running"]) == ("starting", None)


async def test_replicas_that_are_not_told_one_by_one_are_counted(api, monkeypatch) -> None:
    monkeypatch.setattr(live_stats, "MAX_REPLICAS", 1)
    one, other = (
        ReplicaLoad(name=name, state="starting", num_requests=0, weighed_tokens=0)
        for name in ("0", "1")
    )
    api.endpoint.report = LoadReport(replicas=(one, other))
    async with watching(api) as snapshots:
        told = await anext(snapshots)
    assert [replica["name"] for replica in told["replicas"]] == ["0"]
    assert told["num_replicas"] == 2


async def test_rates_are_of_what_came_in_between(api, monkeypatch) -> None:
    report = await api.endpoint.load()
    prompt_tokens = iter([1000, 1100, 1300, 40, 40])
    last = 40

    async def load() -> LoadReport:
        number = next(prompt_tokens, last)
        return msgspec.structs.replace(
            report, num_prompt_tokens=number, num_prefix_hit_tokens=number // 2
        )

    monkeypatch.setattr(api.endpoint, "load", load)
    async with watching(api) as snapshots:
        told = [await anext(snapshots) for _ in range(4)]
    assert told[0]["prompt_tokens_per_s"] is None
    assert told[1]["prompt_tokens_per_s"] > 0
    assert told[1]["prefix_hit_rate"] == 0.5
    assert told[2]["prompt_tokens_per_s"] > 0
    assert told[3]["prompt_tokens_per_s"] == 0, "an engine that was started again counts anew"
    assert told[3]["output_tokens_per_s"] == 0
    assert told[3]["prefix_hit_rate"] == 0.5, "of the last ten seconds"


async def test_what_goes_wrong_while_sampling_is_logged(api, monkeypatch, caplog) -> None:
    async def load() -> LoadReport:
        raise ValueError("no such load")

    monkeypatch.setattr(api.endpoint, "load", load)
    assert (await api.get("/v1/live")).status == 503
    [record] = [one for one in caplog.records if one.name == "pagoda.api.live_stats"]
    assert "no such load" in str(record.exc_info)


async def test_tokens_and_latencies_of_answers(api) -> None:
    async with watching(api) as snapshots:
        await anext(snapshots)
        await api.complete(max_tokens=3, ignore_eos=True)
        async for told in snapshots:
            if told["itl_ms"] is not None:
                break
    assert told["ttft_ms"]["count"] == 1
    assert told["itl_ms"]["count"] == 1  # of the two tokens of "ok"
    assert 0 < told["itl_ms"]["p50"] <= told["itl_ms"]["p90"] <= told["itl_ms"]["p99"]


async def test_running_answers_are_told_one_by_one(serve_api, monkeypatch) -> None:
    monkeypatch.setattr(live_stats, "MAX_ANSWERS", 2)
    api = await serve_api("abcdef")
    api.endpoint.pause_after = 2
    asks = [
        asyncio.create_task(
            api.post(
                "/v1/completions", {"prompt": "hi", "max_tokens": 5}, headers={"X-Request-Id": name}
            )
        )
        for name in ("first", "second", "third")
    ]
    await api.endpoint.paused.wait()
    await until(lambda: len(api.service.tracker.running) == 3)
    await until(lambda: all(r.num_output_tokens == 2 for r in api.service.tracker.running.values()))
    async with watching(api) as snapshots:
        told = await anext(snapshots)
    listed = (await api.get("/v1/requests")).json()
    assert listed["total"] == told["num_answers"] == 3
    assert [answer["name"] for answer in told["answers"]] == ["first", "second"]
    [answer, _] = listed["data"]
    assert answer["id"].startswith("first-")
    assert answer["age_s"] >= 0
    expected = {"state": "generating", "prompt_tokens": 2, "output_tokens": 2, "max_tokens": 5}
    assert {name: answer[name] for name in expected} == expected
    api.endpoint.go_on.set()
    await asyncio.gather(*asks)
    assert (await api.get("/v1/requests")).json() == {"object": "list", "total": 0, "data": []}


async def test_steps_are_told_once_with_their_age(api) -> None:
    async with watching(api) as snapshots:
        await anext(snapshots)
        [listener] = api.endpoint.step_listeners
        listener(StepStatistics([StepBin(0.25, 7, 1, 0.01, 5, 2, 3)], replica="1"))
        async for told in snapshots:
            if told["steps"]:
                break
        [[age_s, *others]] = told["steps"]["1"]
        assert 0.25 <= age_s < 5
        assert others == [7, 1, 0.01, 5, 2, 3]
        assert (await anext(snapshots))["steps"] == {}


async def test_the_steps_of_a_snapshot_are_bounded(api, monkeypatch) -> None:
    monkeypatch.setattr(live_stats, "MAX_STEP_BINS", 10)
    async with watching(api) as snapshots:
        await anext(snapshots)
        [listener] = api.endpoint.step_listeners
        bins = [StepBin(0.0, step, 1, 0.01, 0, 1, 1) for step in range(8)]
        for replica in ("0", "1", "2"):
            listener(StepStatistics(bins, replica=replica))
        async for told in snapshots:
            if told["steps"]:
                break
        assert {name: len(steps) for name, steps in told["steps"].items()} == {
            "0": 8,
            "1": 2,
            "2": 0,
        }


# ---- who looks on


async def test_all_pages_share_one_observation_and_none_is_made_without_a_page(api) -> None:
    tracker = api.service.tracker
    others = tracker.num_listeners
    async with watching(api) as one, watching(api) as other:
        assert await anext(one)
        assert await anext(other)
        assert len(api.endpoint.step_listeners) == 1
        assert tracker.num_listeners == others + 1
    await until(lambda: not api.service.live_stats.is_watched)
    await until(lambda: not api.endpoint.step_listeners and tracker.num_listeners == others)
    async with watching(api) as again:
        assert await anext(again)


async def test_streams_end_with_the_server(api) -> None:
    async with watching(api) as snapshots:
        await anext(snapshots)
        api.service.draining = True
        async for told in snapshots:
            if told["draining"]:
                break
        api.service.live_stats.close()
        async for _ in snapshots:
            pass
    assert (await api.get("/v1/live")).status == 503


async def test_a_stream_has_no_head(api) -> None:
    answer = await api.request("HEAD", "/v1/live")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")
    assert not api.service.live_stats.is_watched
    assert (await api.request("HEAD", "/v1/requests")).status == 200


# ---- cancelling


@pytest.mark.parametrize("by_name", [False, True])
async def test_a_request_is_cancelled_by_its_id(serve_api, by_name: bool) -> None:
    api = await serve_api("abcdef", api_keys=ApiKeys(["k"]))
    headers = {"Authorization": "Bearer k", "X-Request-Id": "mine"}
    api.endpoint.pause_after = 1
    aborted: list[str] = []

    async def abort(request_id: str) -> None:
        aborted.append(request_id)
        api.endpoint.go_on.set()

    api.endpoint.abort = abort
    body = {"prompt": "hi", "n": 2}
    ask = asyncio.create_task(api.post("/v1/completions", body, headers=headers))
    await until(lambda: len(api.service.tracker.running) == 2)
    ids = list(api.service.tracker.running)
    wanted = "mine" if by_name else ids[0]
    assert (await api.request("DELETE", f"/v1/requests/{wanted}")).status == 401
    answer = await api.request("DELETE", f"/v1/requests/{wanted}", headers=headers)
    expected = ids if by_name else ids[:1]
    assert answer.json() == {"id": wanted, "object": "request", "cancelled": expected}
    assert aborted == expected
    await ask


async def test_a_key_sees_and_ends_only_its_own_requests(serve_api) -> None:
    api = await serve_api("abcdef", api_keys=ApiKeys(["alice:=a", "bob:=b"]))
    api.endpoint.pause_after = 1
    aborted: list[str] = []

    async def abort(request_id: str) -> None:
        aborted.append(request_id)

    api.endpoint.abort = abort
    alice, bob = ({"Authorization": f"Bearer {key}", "X-Request-Id": "job1"} for key in "ab")
    asks = []
    for number, headers in enumerate((alice, bob), start=1):
        body = {"prompt": "hi"}
        asks.append(asyncio.create_task(api.post("/v1/completions", body, headers=headers)))
        await until(lambda number=number: len(api.service.tracker.running) == number)
    of_alice, of_bob = api.service.tracker.running
    listed = (await api.get("/v1/requests", headers=bob)).json()
    assert (listed["total"], [answer["id"] for answer in listed["data"]]) == (1, [of_bob])
    async with watching(api, **alice) as snapshots:
        told = await anext(snapshots)
    assert (told["num_answers"], [answer["id"] for answer in told["answers"]]) == (1, [of_alice])
    assert (await api.request("DELETE", f"/v1/requests/{of_alice}", headers=bob)).status == 404
    answer = await api.request("DELETE", "/v1/requests/job1", headers=bob)
    assert answer.json()["cancelled"] == aborted == [of_bob]
    api.endpoint.go_on.set()
    await asyncio.gather(*asks)
    gone = await api.request("DELETE", "/v1/requests/job1", headers=bob)
    assert (gone.status, gone.error()["code"]) == (404, "request_not_found")
