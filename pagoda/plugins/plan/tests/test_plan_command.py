# SPDX-License-Identifier: Apache-2.0
"""`pagoda plan` against a router that answers from a script: figures, journal, replay, outputs and changes."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import pagoda.plugins.plan.router as router_module
from pagoda.cli.openai_client import OpenAIClient
from pagoda.errors import ConfigError
from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.command import OutputOptions, Planner, PlanOptions, replay
from pagoda.plugins.plan.figures import Plan, PoolFigures
from pagoda.plugins.plan.journal import Journal
from pagoda.plugins.plan.journal import replay as replayed
from pagoda.plugins.plan.outputs import EXTERNAL_METRICS
from pagoda.plugins.plan.router import Counts, Reading, RouterLink, counts_of, pool_figures

OPTIONS = PlanOptions(
    step_time=0.025, token_time=2.4e-4, max_num_batched_tokens=512, slo_ttft=2.0, min_hosts=2
)
CONFIG = OPTIONS.config()


def metrics(requests: int, waiting: int = 0, late: int = 0) -> str:
    """A text of `/metrics` after so many answers, each of 1,500 prompt and 250 generated tokens."""
    buckets = {"2.5": requests - late, "+Inf": requests}
    return "\n".join(
        [
            "# TYPE pagoda_requests_total counter",
            f'pagoda_requests_total{{model_name="m",key="",finish_reason="stop"}} {requests}',
            "# TYPE pagoda_num_requests_waiting gauge",
            f'pagoda_num_requests_waiting{{model_name="m",replica="1"}} {waiting}',
            "# TYPE pagoda_request_prompt_tokens histogram",
            f'pagoda_request_prompt_tokens_sum{{model_name="m",key=""}} {1500 * requests}',
            f'pagoda_request_prompt_tokens_count{{model_name="m",key=""}} {requests}',
            "# TYPE pagoda_request_generated_tokens histogram",
            f'pagoda_request_generated_tokens_sum{{model_name="m",key=""}} {250 * requests}',
            f'pagoda_request_generated_tokens_count{{model_name="m",key=""}} {requests}',
            "# TYPE pagoda_prefix_cache_queries counter",
            f'pagoda_prefix_cache_queries_total{{model_name="m",replica="1"}} {1500 * requests}',
            "# TYPE pagoda_prefix_cache_hits counter",
            f'pagoda_prefix_cache_hits_total{{model_name="m",replica="1"}} {300 * requests}',
            "# TYPE pagoda_time_to_first_token_seconds histogram",
            *(
                f'pagoda_time_to_first_token_seconds_bucket{{model_name="m",key="",le="{le}"}} {n}'
                for le, n in buckets.items()
            ),
            "",
        ]
    )


class ScriptedRouter:
    """A router whose figures a test sets."""

    def __init__(self) -> None:
        self.requests = 0
        self.roles = {"h1": "prefill", "h2": "standby", "h3": "decode"}
        self.posted: list[Any] = []
        self.fails = False
        self.app = web.Application()
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/v1/hosts", self._hosts)
        self.app.router.add_patch("/v1/hosts/{id}", self._change)
        self.app.router.add_post("/hook", self._hook)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=metrics(self.requests), status=500 if self.fails else 200)

    async def _hosts(self, _: web.Request) -> web.Response:
        able = ["prefill", "decode", "both", "standby"]
        data = [
            {"id": it, "model": "m", "state": "ready", "role": role, "roles": able}
            for it, role in self.roles.items()
        ]
        gone = {"id": None, "model": "m", "state": "connecting", "role": "none", "roles": []}
        return web.json_response({"object": "list", "data": [*data, gone]})

    async def _change(self, request: web.Request) -> web.Response:
        self.roles[request.match_info["id"]] = (await request.json())["role"]
        return web.json_response({})

    async def _hook(self, request: web.Request) -> web.Response:
        self.posted.append(await request.json())
        return web.Response()


@asynccontextmanager
async def planned(
    tmp_path: Path, **outputs: Any
) -> AsyncIterator[tuple[ScriptedRouter, Planner, Any]]:
    """A scripted router, a planner, and a function that decides after some seconds with some more requests."""
    router = ScriptedRouter()
    async with TestServer(router.app) as server, aiohttp.ClientSession() as hooks:
        url = str(server.make_url("")).rstrip("/")
        options = OutputOptions(
            journal=tmp_path / "journal.jsonl", webhook=f"{url}/hook", **outputs
        )
        planner = Planner(Journal(CONFIG, options.journal), options, 30.0)
        async with OpenAIClient(url) as client:
            link = RouterLink([client], CONFIG.slo)
            clock = iter(range(1_000_000, 2_000_000, 30))

            async def decide(requests: int) -> Plan | None:
                router.requests += requests
                return await planner.decide(link, hooks, float(next(clock)))

            await decide(0)
            yield router, planner, decide


async def test_a_plan_is_made_of_the_routers_figures_and_told(tmp_path: Path) -> None:
    async with planned(tmp_path, change_roles=True) as (router, planner, decide):
        plan = await decide(240)
        assert plan is not None
        [pool] = plan.pools
        assert pool.rate == pytest.approx(8.0)
        assert router.roles["h2"] == "prefill"
        assert router.posted == [json.loads(msgspec.json.encode(plan))]
        await decide(240)
        assert len(router.posted) == 1
        router.fails = True
        assert await decide(240) is None
        assert planner.page.num_failures == 1

        async with TestServer(planner.page.app()) as page, aiohttp.ClientSession() as session:
            text = await (await session.get(page.make_url("/metrics"))).text()
            told = int(pool.hosts[Role.PREFILL])
            assert f'pagoda_plan_hosts{{pool="m",role="prefill"}} {told}.0' in text
            answer = await session.get(page.make_url("/plan"))
            assert (await answer.json())["pools"]["m"]["prefill"] == told
            where = f"{EXTERNAL_METRICS}/namespaces/default/pagoda_plan_hosts"
            query = {"labelSelector": "pool=m,role=prefill"}
            values = await (await session.get(page.make_url(where), params=query)).json()
            assert values["kind"] == "ExternalMetricValueList"
            [item] = values["items"]
            assert (item["value"], item["metricLabels"]["role"]) == (str(told), "prefill")
            bad = await session.get(page.make_url(where), params={"labelSelector": "pool!=m"})
            assert bad.status == 400
            listed = await (await session.get(page.make_url(EXTERNAL_METRICS))).json()
            assert [it["name"] for it in listed["resources"]] == ["pagoda_plan_hosts"]


async def test_without_permission_nothing_is_changed(tmp_path: Path) -> None:
    async with planned(tmp_path) as (router, _, decide):
        plan = await decide(240)
        assert plan is not None
        assert plan.pools[0].changes
        assert router.roles == {"h1": "prefill", "h2": "standby", "h3": "decode"}


async def test_a_journal_is_decided_again_byte_for_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal.jsonl"
    async with planned(tmp_path) as (_, _, decide):
        for requests in (240, 30, 500, 0):
            await decide(requests)
    assert replay(path) == 0
    assert "4 decisions, all with the same bytes." in capsys.readouterr().out
    *_, last = replayed(path)
    assert Journal(CONFIG, path).memory == last.memory
    assert replay(path) == 0

    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:-5])  # the planner was killed
    assert Journal(CONFIG, path).memory == last.memory
    assert path.read_bytes() == whole + whole.splitlines(keepends=True)[-1]

    lines = path.read_text().splitlines(keepends=True)
    other = re.sub(r'"rate":[0-9.]+', '"rate":1.5', lines[2], count=1)
    path.write_text("".join([*lines[:2], other, *lines[3:]]))
    assert replay(path) == 1
    assert f"{path}:3: decided now:" in capsys.readouterr().out.replace("\n", "")


async def test_a_journal_begins_again_where_it_was_taken_away_and_is_whole_whatever_routers_say(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    async with planned(tmp_path) as (router, planner, decide):
        await decide(240)
        path.unlink()
        router.roles["../../x?y"] = "standby"
        assert await decide(10**40) is not None
        assert replay(path) == 0
        path.unlink()
        path.mkdir()
        assert await decide(1) is None
        assert planner.page.num_failures == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}\n", ":1: the line is none of a journal"),
        ('{"type":"decided"}\n', ":1: the line is none of a journal"),
        ("nothing", ":1: the line must have an end"),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "journal"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}{reason}")):
        replay(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "missing")


def test_figures_of_a_window_are_what_was_counted_in_it() -> None:
    before, now = (
        counts_of([Reading(text)])["m"] for text in (metrics(100, 2), metrics(200, 7, late=10))
    )
    figures = pool_figures("m", CONFIG.slo, 30.0, now, before, ())
    assert (figures.num_arrivals, figures.num_waiting) == (100, 7)
    assert (figures.prompt_tokens, figures.output_tokens) == (1200.0, 250.0)
    assert (figures.late_share, figures.slow_share) == (0.1, 0.0)
    again = pool_figures(
        "m", CONFIG.slo, 30.0, before, now, ()
    )  # the router has been started again
    assert again.num_arrivals == 100
    assert counts_of([Reading()]) == {}


def test_numbers_beyond_all_reason_stay_in_range() -> None:
    text = metrics(100).replace("150000", "1e300").replace("25000", "NaN").replace(" 100", " -1e11")
    counts = counts_of([Reading(text)])["m"]
    figures = pool_figures("m", CONFIG.slo, 30.0, counts, Counts(), ())
    assert msgspec.json.decode(msgspec.json.encode(figures), type=PoolFigures) == figures
    unbounded = metrics(100).replace('le="2.5"', 'le="0.1"').replace('le="+Inf"', 'le="0.2"')
    counts = counts_of([Reading(unbounded)])["m"]
    with pytest.raises(ValueError, match="empty"):
        pool_figures("m", CONFIG.slo, 30.0, counts, Counts(), ())


def test_two_routers_add_up_and_their_replicas_count_once() -> None:
    values = counts_of([Reading(metrics(100, 2)), Reading(metrics(50, 3))])["m"].values
    assert values["pagoda_requests_total"] == 150
    assert values["pagoda_num_requests_waiting"] == 3
    assert values["pagoda_prefix_cache_hits_total"] == 30_000


async def test_a_router_that_is_gone_does_not_keep_a_plan_from_being_made() -> None:
    here, gone = ScriptedRouter(), ScriptedRouter()
    async with (
        TestServer(here.app) as one,
        TestServer(gone.app) as other,
        OpenAIClient(str(one.make_url("/"))) as first,
        OpenAIClient(str(other.make_url("/"))) as second,
    ):
        link = RouterLink([first, second], CONFIG.slo)
        here.requests, gone.requests = 10, 20
        assert await link.figures(0.0) is None
        here.requests, gone.requests, gone.fails = 40, 80, True
        figures = await link.figures(30.0)
        assert figures is not None
        assert figures.pools[0].num_arrivals == 30
        gone.fails = False
        figures = await link.figures(60.0)
        assert figures is not None
        assert figures.pools[0].num_arrivals == 60


def test_the_series_are_those_that_servers_tell() -> None:
    source = Path(router_module.__file__).read_text()
    told = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    names = set(re.findall(r"pagoda_[a-z_]+[a-z]", source))
    assert len(names) > 8
    assert {name for name in names if f"`{name}`" not in told} == set()


def test_limits_that_contradict_each_other_are_refused() -> None:
    options = PlanOptions(step_time=0.1, token_time=0.1, min_hosts=9, max_hosts=3)
    with pytest.raises(ConfigError, match="--min-hosts 9 must be at most --max-hosts 3"):
        options.config()
