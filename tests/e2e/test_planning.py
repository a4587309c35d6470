# SPDX-License-Identifier: Apache-2.0
"""A planner over a router and hosts as processes: what it reads of them, and the roles that it gives them."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import aiohttp
from pod_processes import PodProcesses, long_bodies, until_hosts
from streams import stream_all

from pagoda.cli.openai_client import OpenAIClient
from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.command import OutputOptions, Planner, PlanOptions, replay
from pagoda.plugins.plan.journal import Journal
from pagoda.plugins.plan.router import RouterLink

WINDOW_S = 10.0
NUM_REQUESTS, OUTPUT_TOKENS = 40, 20


async def _roles(router: str) -> Counter[str]:
    async with aiohttp.ClientSession(router) as session, session.get("/v1/hosts") as response:
        return Counter(host["role"] for host in (await response.json())["data"])


def test_hosts_get_the_roles_that_a_plan_made_of_real_figures_wants(tmp_path: Path) -> None:
    """Hosts are said to run so few requests that these take two of them. One of three stands by at first."""
    options = PlanOptions(step_time=0.01, token_time=1e-4, max_num_seqs=2, max_hosts=3)
    config = options.config()
    outputs = OutputOptions(journal=tmp_path / "plan.jsonl", change_roles=True)
    with ExitStack() as stack:
        pod = PodProcesses(tmp_path, stack)
        for role in ("prefill", "decode", "decode"):
            pod.host(role, "--role-changes")
        router = pod.route().base_url

        async def watch() -> None:
            await until_hosts(router, 3)
            planner = Planner(Journal(config, outputs.journal), outputs, WINDOW_S)
            async with OpenAIClient(router) as client, aiohttp.ClientSession() as hooks:
                link = RouterLink([client], config.slo)
                assert await planner.decide(link, hooks, 0.0) is None
                await planner.decide(link, hooks, WINDOW_S)
                assert await _roles(router) == {"prefill": 1, "decode": 1, "standby": 1}

                await stream_all(router, long_bodies(NUM_REQUESTS, OUTPUT_TOKENS))
                plan = await planner.decide(link, hooks, 2 * WINDOW_S)
                assert plan is not None
                [pool] = plan.pools
                assert pool.rate >= NUM_REQUESTS / WINDOW_S
                assert pool.hosts[Role.DECODE] == 2
                assert await _roles(router) == {"prefill": 1, "decode": 2}

        asyncio.run(watch())
    assert replay(tmp_path / "plan.jsonl") == 0
