# SPDX-License-Identifier: Apache-2.0
"""Routers of three pools, asked by openai's client, also through smg and vllm-router: each model's answers are
those of its host alone, token for token, also when a host or a router is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
from test_routers import routing

from conftest import PAGODA, free_port, get, running

POOLS = """\
pools:
  tiny: {model: pagoda-tiny}
  rough: {model: pagoda-tiny}
  chat: {model: smollm2}
"""
HOSTS = {
    "tiny": (),
    "other tiny": (),
    "rough": ("--quantization", "int8"),
    "chat": ("--model", "smollm2", "--kv-cache-memory-bytes", "192MiB"),
}
"""Flags of the hosts; the end of a name is the pool's."""
QUIET = ("--threads", "1", "--log-level", "warning")
MODELS = ("tiny", "rough", "chat")
KNOWN = {"smg": ("tiny",)}
"""smg asks a worker over HTTP for its models, and takes the first one alone."""


class Front(NamedTuple):
    url: str
    models: tuple[str, ...]
    """Models that may be asked for there."""


class Fleet:
    """Two routers of three pools, and their hosts, which have ports of their own, too."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._programs: dict[str, subprocess.Popen[bytes]] = {}
        self._pools, key = directory / "pools.yaml", directory / "key"
        self._pools.write_text(POOLS)
        key.write_text(os.urandom(16).hex())
        self._key = ("--cluster-key-file", str(key))
        names = ("router", "other router", *HOSTS)
        self.urls = {name: f"http://127.0.0.1:{free_port()}" for name in names}
        self._joins = {name: f"127.0.0.1:{free_port()}" for name in names[:2]}
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        """Starts a host, or a router, which is ready only with its hosts."""
        if name in self._joins:
            of_kind = ["route", "--pools", str(self._pools), "--join-listen", self._joins[name]]
        else:
            pool = ["--pool", name.split()[-1]]
            of_kind = ["serve", *HOSTS[name], *pool, "--join", ",".join(self._joins.values())]
        url, router = self.urls[name], name in self._joins
        command = [PAGODA, *of_kind, *self._key, "--port", url.rpartition(":")[2]]
        command += QUIET[2:] if router else QUIET
        ready = f"{url}/health/live" if router else f"{url}/health/ready"
        self._programs[name] = self._stack.enter_context(running(command, ready))

    def kill(self, name: str) -> None:
        os.killpg(self._programs[name].pid, signal.SIGKILL)
        self._programs[name].wait()

    async def until_whole(self) -> None:
        """Returns when both routers use all hosts."""
        for name in self._joins:
            while True:
                hosts = json.loads(get(f"{self.urls[name]}/v1/hosts"))["data"]
                if [host["state"] for host in hosts] == ["ready"] * len(HOSTS):
                    break
                await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("fleet"), stack)


@pytest.fixture(scope="module", params=["none", "smg", "vllm_router"])
def front(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Front]:
    """Another's router before both of Pagoda's, or one of these."""
    asyncio.run(fleet.until_whole())
    if request.param == "none":
        yield Front(fleet.urls["router"], MODELS)
        return
    workers = [fleet.urls["router"], fleet.urls["other router"]]
    command, url = routing(request.param, "--worker-urls", *workers)
    with running(command, f"{url}/readiness"):
        yield Front(url, KNOWN.get(request.param, MODELS))


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=10)


def body(number: int, length: int) -> dict[str, object]:
    return {
        "prompt": f"{number}. Write about bridges.",
        "temperature": 1.0,
        "seed": number,
        "max_tokens": length,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }


async def answer(url: str, model: str, number: int, length: int) -> list[int]:
    async with client(url) as asking:
        answered = await asking.completions.create(model=model, **body(number, length))
    return list(answered.choices[0].token_ids)


async def stream(url: str, number: int, length: int, begun: asyncio.Event) -> list[int]:
    tokens: list[int] = []
    async with client(url) as asking:
        chunks = await asking.completions.create(model="tiny", stream=True, **body(number, length))
        async for chunk in chunks:
            for choice in chunk.choices:
                tokens += choice.token_ids or []
            begun.set()
    return tokens


def hosts_name(model: str) -> str:
    """The name of the model at its host."""
    return {"rough": "pagoda-tiny", "tiny": "pagoda-tiny", "chat": "smollm2"}[model]


async def alone(fleet: Fleet, model: str, numbers: range, length: int) -> list[list[int]]:
    asked = (answer(fleet.urls[model], hosts_name(model), it, length) for it in numbers)
    return await asyncio.gather(*asked)


async def test_answers_are_those_of_the_models_host(fleet: Fleet, front: Front) -> None:
    numbers = range(4)
    expected = {model: await alone(fleet, model, numbers, 40) for model in MODELS}
    assert expected["tiny"] != expected["rough"]
    for model in front.models:
        found = await asyncio.gather(*(answer(front.url, model, it, 40) for it in numbers))
        assert found == expected[model]


async def test_a_host_is_killed_in_mid_answer(fleet: Fleet, front: Front) -> None:
    numbers = range(8)
    expected = await alone(fleet, "tiny", numbers, 600)
    begun = [asyncio.Event() for _ in numbers]
    asking = asyncio.gather(*(stream(front.url, it, 600, begun[it]) for it in numbers))
    await asyncio.gather(*(one.wait() for one in begun))
    assert not asking.done()
    fleet.kill("other tiny")
    assert await asking == expected
    fleet.start("other tiny")
    await fleet.until_whole()


async def test_a_router_is_killed_in_mid_answer(fleet: Fleet, front: Front) -> None:
    """Clients ask again, and whoever stands before two routers asks the other one."""
    numbers = range(8)
    expected = [await alone(fleet, model, numbers, 200) for model in front.models]
    asking = asyncio.gather(
        *(answer(front.url, model, it, 200) for model in front.models for it in numbers)
    )
    while not json.loads(get(f"{fleet.urls['router']}/v1/load"))["num_running"]:
        await asyncio.sleep(0.01)
    fleet.kill("router")
    await asyncio.to_thread(fleet.start, "router")
    assert await asking == [tokens for answers in expected for tokens in answers]
    await fleet.until_whole()
