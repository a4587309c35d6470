# SPDX-License-Identifier: Apache-2.0
"""Routers of three pools, one below the other, over hosts that join their pool; a host is lost, and a router."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import openai
from ports import free_ports
from sim_hosts import PROMPT, expected, router_process, start_host, write_key

VOCABULARIES = {"alpha": 512, "beta": 480, "gamma": 448}
"""Pools, and the vocabularies by which their answers differ."""
POOLS = """\
pools:
  alpha: {model: pagoda-tiny, aliases: [gpt-4o], policy: least-pending-tokens}
  beta: {model: pagoda-tiny, no_replica_timeout: 20}
  gamma: {model: pagoda-tiny, fallback: [alpha]}
models:
  mixed: {alpha: 1, beta: 1}
"""
SHORT, LONG = 8, 120


async def answer(client: openai.AsyncOpenAI, model: str, seed: int, length: int) -> list[int]:
    """The tokens of an answer, which says that the pool has given it that was asked for."""
    answered = await client.completions.create(
        model=model,
        prompt=PROMPT,
        temperature=1.0,
        seed=seed,
        max_tokens=length,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert answered.model == {"gpt-4o": "alpha"}.get(model, model)
    return list(answered.choices[0].token_ids)  # type: ignore[attr-defined]


def due(model: str, seed: int, length: int) -> list[int]:
    return expected(seed, length, VOCABULARIES[{"gpt-4o": "alpha"}.get(model, model)])


async def until_ready(base_url: str, counts: dict[str, int]) -> None:
    """Waits until a router uses so many hosts of each pool."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{base_url}/v1/hosts") as response:
                hosts = (await response.json())["data"]
            ready = [host["model"] for host in hosts if host["state"] == "ready"]
            if {model: ready.count(model) for model in counts} == counts:
                return
            await asyncio.sleep(0.05)


async def test_three_pools_answer_through_two_levels_also_when_a_host_and_a_router_are_lost(
    tmp_path: Path,
) -> None:
    key_file, pools = write_key(tmp_path), tmp_path / "pools.yaml"
    pools.write_text(POOLS)
    flags = ("--cluster-key-file", str(key_file), "--pools", str(pools))
    top, middle, other = (f"127.0.0.1:{port}" for port in free_ports(3))
    async with AsyncExitStack() as stack:
        hosts = []
        for name in ("alpha", "beta", "beta", "gamma"):
            host = await start_host(
                f"{middle},{other}",
                key_file,
                step_s=0.01,
                name=name,
                pool="beta" if name == "beta" else "",
                vocab_size=VOCABULARIES[name],
            )
            hosts.append(host)
        stack.push_async_callback(hosts[0].close)
        stack.push_async_callback(hosts[2].close)
        upper, lower, second = await asyncio.gather(
            *(
                stack.enter_async_context(router_process(*flags, *more))
                for more in (
                    ("--join-listen", top),
                    ("--join-listen", middle, "--join", top),
                    ("--join-listen", other, "--join", top),
                )
            )
        )
        await until_ready(upper.base_url, dict.fromkeys(VOCABULARIES, 2))
        await until_ready(lower.base_url, {"alpha": 1, "beta": 2, "gamma": 1})
        client = openai.AsyncOpenAI(base_url=f"{upper.base_url}/v1", api_key="-", max_retries=0)
        stack.push_async_callback(client.close)
        listed = {model.id: model.root async for model in client.models.list()}  # type: ignore[attr-defined]
        names = ("alpha", "gpt-4o", "beta", "gamma")
        assert listed == {
            "alpha": "alpha",
            "gpt-4o": "alpha",
            "beta": "beta",
            "gamma": "gamma",
            "mixed": "alpha",
        }
        asked = [(name, seed, LONG) for name in names for seed in range(6)]
        asking = asyncio.gather(*(answer(client, *one) for one in asked))
        while not all([(await host.dispatcher.load()).num_running for host in hosts]):
            assert not asking.done()
            await asyncio.sleep(0.01)
        os.kill(second.pid, signal.SIGKILL)
        await hosts[1].close()
        assert await asking == [due(*one) for one in asked]
        await until_ready(upper.base_url, dict.fromkeys(VOCABULARIES, 1))

        # A model whose hosts are gone is answered by its fallback; what was mixed goes to both.
        await hosts[3].close()
        await until_ready(lower.base_url, {"alpha": 1, "beta": 1, "gamma": 0})
        body = {"model": "gamma", "prompt": PROMPT, "max_tokens": SHORT, "ignore_eos": True}
        mixed = {**body, "model": "mixed"}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{lower.base_url}/v1/completions", json=body) as response:
                assert (await response.json())["model"] == "alpha"
            answered = set()
            for number in range(16):
                headers = {"X-Request-Id": f"r{number}"}
                async with session.post(
                    f"{lower.base_url}/v1/completions", json=mixed, headers=headers
                ) as response:
                    answered.add((await response.json())["model"])
            async with session.get(f"{lower.base_url}/metrics") as response:
                metrics = await response.text()
            async with session.get(f"{lower.base_url}/v1/load") as response:
                models = {one["model"] for one in (await response.json())["replicas"]}
            async with session.get(f"{lower.base_url}/v1/live") as response:
                line = await anext(aiter(response.content))
                shown = json.loads(line.removeprefix(b"data: "))
        assert answered == {"alpha", "beta"} == models
        assert shown["pools"] == list(VOCABULARIES)
        assert {name: it["hosts"] for name, it in shown["of_pools"].items()} == {
            "alpha": 1,
            "beta": 1,
        }
        assert {one["model"] for one in shown["replicas"]} == models
        assert 'pagoda_answer_tokens_total{key="",model_name="beta"}' in metrics
