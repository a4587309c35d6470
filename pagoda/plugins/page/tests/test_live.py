# SPDX-License-Identifier: Apache-2.0
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

from pagoda.api.auth.keys import ApiKeys
from pagoda.messages.frontend import StepBin, StepStatistics
from pagoda.messages.load import LoadReport, ReplicaLoad, TierLoad
from pagoda.plugins.page import live_history, live_stats
from pagoda.plugins.page.state import PageState


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


async def complete_as(api: Any, headers: dict[str, str], **fields: object) -> Any:
    return await api.post("/v1/completions", {"prompt": "hi", **fields}, headers=headers)


# ---- snapshots


async def test_a_snapshot_says_all_of_a_server(api, monkeypatch) -> None:
    """Replicas beyond the bound are counted and not told one by one."""
    monkeypatch.setattr(live_stats, "MAX_REPLICAS", 2)
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
        tiers=(TierLoad(name="host", num_blocks=3, num_total_blocks=8, is_indexed=False),),
    )
    ready = ReplicaLoad(name="0", state="ready", num_requests=2, weighed_tokens=9, report=own)
    gone, other = (
        ReplicaLoad(name=name, state="starting", num_requests=0, weighed_tokens=0)
        for name in ("1", "2")
    )
    api.endpoint.report = msgspec.structs.replace(own, replicas=(ready, gone, other))
    async with watching(api) as snapshots:
        told = await anext(snapshots)
    expected = {
        "started": api.service.created,
        "is_router": False,
        "draining": False,
        "num_running": 2,
        "num_waiting": 1,
        "num_awaiting_kv": 4,
        "num_preemptions": 3,
        "num_restarts": 1,
        "num_replicas": 3,
        # Nothing came before.
        **dict.fromkeys(
            ("prompt_tokens_per_s", "output_tokens_per_s", "prefix_hit_rate", "draft_length")
        ),
        **dict.fromkeys(("ttft_ms", "itl_ms")),
    }
    assert {name: told[name] for name in expected} == expected
    device, host = told["tiers"]
    assert [device[name] for name in ("num_total", "num_used", "num_cached")] == [64, 24, 10]
    assert (host["name"], host["num_cached"], host["is_indexed"]) == ("host", 3, False)
    first, second = told["replicas"]
    assert (first["num_waiting"], first["step_time_ms"]) == (5, 12.0)
    assert [first[f"num_{kind}blocks"] for kind in ("", "used_", "cached_")] == [64, 24, 10]
    assert (second["state"], second["num_running"]) == ("starting", None)


async def test_rates_are_of_what_came_in_between(api, monkeypatch) -> None:
    report = await api.endpoint.load()
    prompt_tokens = iter([1000, 1100, 1300, 40, 40])
    last = 40
    # The answer begins with the first snapshot. A watcher that is slow for once would miss one.
    wanted = asyncio.Semaphore(1)

    async def load() -> LoadReport:
        await wanted.acquire()
        number = next(prompt_tokens, last)
        return msgspec.structs.replace(
            report,
            num_running=1,
            num_prompt_tokens=number,
            num_prefix_hit_tokens=number // 2,
        )

    monkeypatch.setattr(api.endpoint, "load", load)
    async with watching(api) as snapshots:
        told = []
        for _ in range(4):
            told.append(await anext(snapshots))
            wanted.release()
    assert told[0]["prompt_tokens_per_s"] is None
    assert told[1]["prompt_tokens_per_s"] > 0
    assert told[1]["prefix_hit_rate"] == 0.5
    assert told[2]["prompt_tokens_per_s"] > 0
    assert told[3]["prompt_tokens_per_s"] == 0, "an engine that was started again counts anew"
    assert told[3]["output_tokens_per_s"] == 0
    assert told[3]["prefix_hit_rate"] == 0.5, "of the last ten seconds"


@pytest.mark.parametrize(("num_running", "asked_before"), [(0, [0, 3, 6]), (1, [0, 1, 2])])
async def test_an_endpoint_with_nothing_to_do_is_asked_for_every_third_snapshot(
    api, monkeypatch, num_running: int, asked_before: list[int]
) -> None:
    report = msgspec.structs.replace(await api.endpoint.load(), num_running=num_running)
    num_made = 0
    asked: list[int] = []

    async def load() -> LoadReport:
        asked.append(num_made)
        return report

    def tiers(_report: LoadReport) -> list[dict[str, Any]]:
        nonlocal num_made
        num_made += 1
        return []

    monkeypatch.setattr(api.endpoint, "load", load)
    monkeypatch.setattr(live_stats, "_tiers", tiers)
    async with watching(api):
        await until(lambda: len(asked) >= 3)
    assert asked[:3] == asked_before


async def test_a_request_is_on_the_next_snapshot_though_nothing_ran_before(
    api, monkeypatch
) -> None:
    monkeypatch.setattr(live_stats, "IDLE_SNAPSHOTS", 1_000_000)
    idle = await api.endpoint.load()
    busy = msgspec.structs.replace(idle, num_prompt_tokens=idle.num_prompt_tokens + 7)
    async with watching(api) as snapshots:
        for _ in range(3):
            assert (await anext(snapshots))["num_running"] == 0
        api.endpoint.report = msgspec.structs.replace(busy, num_running=5)
        await anext(snapshots)
        assert (await anext(snapshots))["num_running"] == 0, "nothing was seen to begin"
        await api.complete(max_tokens=3, ignore_eos=True)
        async for told in snapshots:
            if told["num_running"] == 5:
                break


async def test_after_a_while_without_anything_to_do_snapshots_wait_for_a_request(
    api, monkeypatch
) -> None:
    """Nothing of the last ten seconds is left to be shown then."""
    monkeypatch.setattr(live_stats, "IDLE_SNAPSHOTS", 1_000_000)
    monkeypatch.setattr(live_stats, "WINDOW_S", 0.05)
    rests: list[float] = []
    timeout_at = asyncio.timeout_at

    def rest(until_s: float) -> asyncio.Timeout:
        rests.append(until_s)
        return timeout_at(until_s)

    monkeypatch.setattr(asyncio, "timeout_at", rest)
    async with watching(api) as snapshots:
        late = asyncio.get_running_loop().time() + 1000
        await until(lambda: any(at > late for at in rests))
        await api.complete(max_tokens=3, ignore_eos=True)
        async for told in snapshots:
            if told["ttft_ms"] is not None:
                break
    assert told["ttft_ms"]["count"] == 1


async def test_what_goes_wrong_while_sampling_is_logged(api, monkeypatch, caplog) -> None:
    async def load() -> LoadReport:
        raise ValueError("no such load")

    monkeypatch.setattr(api.endpoint, "load", load)
    assert (await api.get("/v1/live")).status == 503
    [record] = [one for one in caplog.records if one.name == "pagoda.plugins.page.live_stats"]
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
    monkeypatch.setattr("pagoda.api.answers.running_answers.MAX_ANSWERS", 2)
    api = await serve_api("abcdef")
    api.endpoint.pause_after = 2
    asks = [
        asyncio.create_task(complete_as(api, {"X-Request-Id": name}, max_tokens=5))
        for name in ("first", "second", "third")
    ]
    running = api.service.tracker.running
    await until(lambda: [r.num_output_tokens for r in running.values()] == [2, 2, 2])
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


async def test_steps_are_told_once_with_their_age_and_bounded(api, monkeypatch) -> None:
    monkeypatch.setattr(live_stats, "MAX_STEP_BINS", 10)
    bins = [StepBin(0.25, 7, 1, 0.01, 5, 2, 3)] * 8
    async with watching(api) as snapshots:
        await anext(snapshots)
        [listener] = api.endpoint.step_listeners
        for replica in ("0", "1", "2"):
            listener(StepStatistics(bins, replica=replica))
        async for told in snapshots:
            if told["steps"]:
                break
        assert [len(told["steps"][replica]) for replica in ("0", "1", "2")] == [8, 2, 0]
        age_s, *others = told["steps"]["1"][0]
        assert 0.25 <= age_s < 5
        assert others == [7, 1, 0.01, 5, 2, 3]
        assert (await anext(snapshots))["steps"] == {}


# ---- who looks on


async def test_all_pages_share_one_observation(api) -> None:
    tracker = api.service.tracker
    others = tracker.num_listeners
    async with watching(api) as one:
        assert await anext(one)
        watched = tracker.num_listeners
        async with watching(api) as other:
            assert await anext(other)
            assert len(api.endpoint.step_listeners) == 1
            assert tracker.num_listeners == watched > others
    async with watching(api) as again:
        assert await anext(again)
        assert (len(api.endpoint.step_listeners), tracker.num_listeners) == (1, watched)
    api.service.state(PageState).live_stats.close()
    await until(lambda: not api.endpoint.step_listeners and tracker.num_listeners == others)


async def test_the_last_minutes_are_there_when_a_page_is_opened(api, monkeypatch) -> None:
    api.service.state(PageState).live_stats.begin(api.endpoint)
    api.endpoint.report = msgspec.structs.replace(await api.endpoint.load(), num_running=1)
    await api.complete(max_tokens=3, ignore_eos=True)
    [listener] = api.endpoint.step_listeners
    listener(StepStatistics([StepBin(0.25, 7, 1, 0.01, 5, 2, 3)], replica="0"))
    made = 0

    def tiers(_report: LoadReport) -> list[dict[str, Any]]:
        nonlocal made
        made += 1
        return []

    monkeypatch.setattr(live_stats, "_tiers", tiers)
    await until(lambda: made >= 5)
    for _ in range(2):  # one page after the other
        async with watching(api) as snapshots:
            first, second = await anext(snapshots), await anext(snapshots)
        points = first["history"]
        assert len(points) >= 4
        assert [point["age_s"] for point in points] == sorted(
            (point["age_s"] for point in points), reverse=True
        )
        assert max(point["ttft_ms"]["count"] for point in points if point["ttft_ms"]) == 1
        assert points[-1]["num_running"] == 1
        [(age_s, *others)] = first["steps"]["0"]
        assert age_s >= 0.25
        assert others == [7, 1, 0.01, 5, 2, 3]
        assert (second.get("history"), second["steps"]) == (None, {})


@pytest.fixture
def rested(monkeypatch) -> asyncio.Event:
    """Set when nothing goes on and nobody watches any more; that is soon."""
    event, rest = asyncio.Event(), live_history.LiveHistory.rest

    def noted(history: live_history.LiveHistory, now: float) -> None:
        rest(history, now)
        event.set()

    monkeypatch.setattr(live_stats, "WINDOW_S", 0.05)
    monkeypatch.setattr(live_stats, "IDLE_SNAPSHOTS", 1)
    monkeypatch.setattr(live_history.LiveHistory, "rest", noted)
    return event


async def answer_and_rest(api: Any, rested: asyncio.Event) -> None:
    rested.clear()
    await api.complete(max_tokens=3, ignore_eos=True)
    async with asyncio.timeout(20):
        await rested.wait()


async def test_a_server_at_rest_that_nobody_watches_sets_no_timer(
    api, monkeypatch, rested: asyncio.Event
) -> None:
    """Nor asks its engines, until a request comes; the time in between is known to have been one of rest."""
    loop, timers, asked = asyncio.get_running_loop(), [], []
    idle, call_at = msgspec.structs.replace(await api.endpoint.load(), num_running=0), loop.call_at

    async def load() -> LoadReport:
        asked.append(loop.time())
        return idle

    monkeypatch.setattr(api.endpoint, "load", load)
    api.service.state(PageState).live_stats.begin(api.endpoint)
    await asyncio.sleep(0)
    assert not asked, "nothing has gone on yet"
    for _ in range(2):
        await answer_and_rest(api, rested)
        before = len(asked)
        with monkeypatch.context() as watched:
            watched.setattr(loop, "call_at", lambda *a, **k: timers.append(a) or call_at(*a, **k))
            for _ in range(100):
                await asyncio.sleep(0)
        assert (len(asked), timers) == (before, [])
    async with watching(api) as snapshots:
        history = (await anext(snapshots))["history"]
    assert len(history) > 10
    assert history[0]["num_running"] == 0


async def test_a_request_during_the_last_snapshot_before_a_rest_is_not_missed(
    api, monkeypatch, rested: asyncio.Event
) -> None:
    idle = msgspec.structs.replace(await api.endpoint.load(), num_running=0)
    asked, ask_at = 0, -1

    async def load() -> LoadReport:
        nonlocal asked
        asked += 1
        if asked == ask_at:
            await api.complete(max_tokens=3, ignore_eos=True)
        return idle

    monkeypatch.setattr(api.endpoint, "load", load)
    api.service.state(PageState).live_stats.begin(api.endpoint)
    counts = []
    for _ in range(2):  # a first answer takes other snapshots than a later one
        await answer_and_rest(api, rested)
        counts.append(asked)
    ask_at = 2 * counts[1] - counts[0]  # as the last before the next rest
    await answer_and_rest(api, rested)
    assert asked == ask_at
    await until(lambda: asked > ask_at)


async def test_a_large_fleet_is_asked_for_open_pages_alone(api, monkeypatch) -> None:
    monkeypatch.setattr(live_stats, "MAX_UNWATCHED_REPLICAS", 1)
    replicas = [
        ReplicaLoad(name=name, state="starting", num_requests=0, weighed_tokens=0) for name in "ab"
    ]
    report = msgspec.structs.replace(
        await api.endpoint.load(), replicas=tuple(replicas), num_running=1
    )
    asked = 0

    async def load() -> LoadReport:
        nonlocal asked
        asked += 1
        return report

    monkeypatch.setattr(api.endpoint, "load", load)
    api.service.state(PageState).live_stats.begin(api.endpoint)
    for _ in range(5):
        await api.complete(max_tokens=3, ignore_eos=True)
    assert asked == 1
    async with watching(api) as snapshots:
        for _ in range(3):
            await anext(snapshots)
    assert asked >= 3


async def test_streams_end_with_the_server(api) -> None:
    async with watching(api) as snapshots:
        await anext(snapshots)
        api.service.draining = True
        async for told in snapshots:
            if told["draining"]:
                break
        api.service.state(PageState).live_stats.close()
        async for _ in snapshots:
            pass
    assert (await api.get("/v1/live")).status == 503


async def test_a_stream_has_no_head(api) -> None:
    answer = await api.request("HEAD", "/v1/live")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")
    assert not api.endpoint.step_listeners
    assert (await api.request("HEAD", "/v1/requests")).status == 200


# ---- cancelling


def note_aborts(api: Any) -> list[str]:
    """The ids of requests that are aborted from now on; the first abort lets all answers go on."""
    aborted: list[str] = []

    async def abort(request_id: str) -> None:
        aborted.append(request_id)
        api.endpoint.go_on.set()

    api.endpoint.pause_after = 1
    api.endpoint.abort = abort
    return aborted


@pytest.mark.parametrize("by_name", [False, True])
async def test_a_request_is_cancelled_by_its_id(serve_api, by_name: bool) -> None:
    api = await serve_api("abcdef", api_keys=ApiKeys(["k"]))
    headers = {"Authorization": "Bearer k", "X-Request-Id": "mine"}
    aborted = note_aborts(api)
    ask = asyncio.create_task(complete_as(api, headers, n=2))
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
    aborted = note_aborts(api)
    alice, bob = ({"Authorization": f"Bearer {key}", "X-Request-Id": "job1"} for key in "ab")
    asks = []
    for number, headers in enumerate((alice, bob), start=1):
        asks.append(asyncio.create_task(complete_as(api, headers)))
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
    await asyncio.gather(*asks)
    gone = await api.request("DELETE", "/v1/requests/job1", headers=bob)
    assert (gone.status, gone.error()["code"]) == (404, "request_not_found")
