# SPDX-License-Identifier: Apache-2.0
"""Adapters and embeddings where requests move: prefill and decode apart, replicas, preemption and deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import aiohttp
import pytest
from adapter_files import save_adapter_of
from pod_processes import (
    HOST,
    PodProcesses,
    fetched,
    load_of,
    long_bodies,
    until_hosts,
    until_ready,
)
from streams import Answer, Disturb, children, stream_all, until_more

from pagoda.checkpoints.resolve import load_model_config, resolve_model
from pagoda.cli.server_process import ServerProcess, server_process

MODELS = ("pagoda-tiny", "one", "two")
# Any two of the prompts find room, and no two of their answers.
FEW_BLOCKS = ["--num-kv-blocks", "72", "--max-model-len", "1024", "--no-enable-prefix-caching"]
TEXTS = [f"{word} is the name of text number {n}" for n in range(6) for word in ("one", "two")]


class Pod(NamedTuple):
    prefill: ServerProcess
    decode: ServerProcess
    router: str


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names two adapters."""
    directory = tmp_path_factory.mktemp("adapters")
    config = load_model_config(resolve_model(None).model, "auto")
    flags = []
    for seed, name in enumerate(MODELS[1:]):
        save_adapter_of(config, directory / name, seed=seed, size=0.4)
        flags += ["--lora", f"{name}={directory / name}"]
    return flags


@pytest.fixture(scope="module")
def alone(flags: list[str]) -> Iterator[str]:
    """A server of one process of each kind, with whose answers all others are compared."""
    with server_process([*HOST, *flags, "--log-level", "warning"]) as server:
        yield server.base_url


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Iterator[Pod]:
    with ExitStack() as stack:
        processes = PodProcesses(tmp_path_factory.mktemp("pod"), stack)
        prefill, decode = (processes.host(role, *flags) for role in ("prefill", "decode"))
        router = processes.route(*flags).base_url
        asyncio.run(until_hosts(router, 2))
        yield Pod(prefill, decode, router)


@pytest.fixture(scope="module")
def replicas(flags: list[str]) -> Iterator[ServerProcess]:
    """A server of two replicas, neither of which has room for what it is asked."""
    quiet = ["--log-level", "warning", "--data-parallel-policy", "round-robin"]
    with server_process([*HOST, *FEW_BLOCKS, *flags, "--dp", "2", *quiet]) as server:
        yield server


def bodies(count: int, salt: str, max_tokens: int = 40) -> list[dict[str, Any]]:
    """The same questions for the model and for each adapter."""
    return [
        {**body, "model": model, "return_token_ids": True, "cache_salt": salt}
        for body in long_bodies(count, max_tokens)
        for model in MODELS
    ]


def check_different(answers: list[Answer]) -> None:
    """Raises AssertionError unless model and adapters say different things."""
    said = [answer.token_ids for answer in answers]
    for index in range(0, len(said), len(MODELS)):
        assert len({tuple(ids) for ids in said[index : index + len(MODELS)]}) == len(MODELS)


async def post(url: str, path: str, body: dict[str, Any]) -> Any:
    async with aiohttp.ClientSession(url) as session, session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


@pytest.mark.parametrize("victim", [None, "prefill", "decode"])
async def test_prefill_and_decode_apart(alone: str, pod: Pod, victim: str | None) -> None:
    """Keys of KV blocks hold the adapter on both sides, before and after the death of a worker."""
    expected = await stream_all(alone, bodies(4, "alone"))
    check_different(expected)

    async def kill(received: Callable[[], int]) -> None:
        await until_more(received, 100)
        while await fetched(pod.decode.base_url) == before:
            await asyncio.sleep(0.01)
        host = pod.prefill if victim == "prefill" else pod.decode
        [worker] = children(host.pid, "pagoda.worker.main")
        os.kill(worker, signal.SIGKILL)

    disturb: Disturb | None = None if victim is None else kill
    await until_hosts(pod.router, 2)
    await until_ready(pod.prefill.base_url)  # the test before may have killed its worker
    before = await fetched(pod.decode.base_url)
    assert await stream_all(pod.router, bodies(4, f"{victim}"), disturb) == expected
    assert await fetched(pod.decode.base_url) > before


async def test_preempted_on_replicas_whose_worker_dies(alone: str, replicas: ServerProcess) -> None:
    expected = await stream_all(alone, bodies(8, "alone", 160))

    async def kill(received: Callable[[], int]) -> None:
        await until_more(received, 60)
        worker, other = children(replicas.pid, "pagoda.worker.main")
        assert worker != other
        os.kill(worker, signal.SIGKILL)

    assert await stream_all(replicas.base_url, bodies(8, "few", 160), kill) == expected
    assert (await load_of(replicas.base_url))["num_preemptions"] > 0


async def test_log_probabilities_of_prompts(alone: str, pod: Pod, replicas: ServerProcess) -> None:
    prompt = " ".join(TEXTS)
    choices = {}
    for url in (alone, pod.router, replicas.base_url):
        for model in MODELS:
            body = {"model": model, "prompt": prompt, "max_tokens": 3, "temperature": 0}
            body |= {"logprobs": 2, "prompt_logprobs": 2}
            [choices[url, model]] = (await post(url, "/v1/completions", body))["choices"]
    for model in MODELS:
        assert choices[pod.router, model] == choices[alone, model]
        assert choices[replicas.base_url, model] == choices[alone, model]
        assert len(choices[alone, model]["prompt_logprobs"]) > 100
    assert choices[alone, "one"]["prompt_logprobs"] != choices[alone, "two"]["prompt_logprobs"]


async def test_vectors(alone: str, pod: Pod, replicas: ServerProcess) -> None:
    """A list of texts is shared out among replicas, and comes back in its order."""
    vectors = {}
    for url in (alone, pod.router, replicas.base_url):
        for model in MODELS:
            body = {"model": model, "input": TEXTS}
            answer = await post(url, "/v1/embeddings", body)
            assert [one["index"] for one in answer["data"]] == list(range(len(TEXTS)))
            vectors[url, model] = [one["embedding"] for one in answer["data"]]
    for model in MODELS:
        assert vectors[pod.router, model] == vectors[alone, model]
        assert vectors[replicas.base_url, model] == vectors[alone, model]
    assert vectors[alone, "one"] != vectors[alone, "two"] != vectors[alone, MODELS[0]]


async def test_vectors_while_a_worker_dies(alone: str, replicas: ServerProcess) -> None:
    texts = [f"{text}, once more" * 20 for text in TEXTS * 4]
    expected = await post(alone, "/v1/embeddings", {"input": texts})

    def ask() -> asyncio.Task[Any]:
        return asyncio.create_task(post(replicas.base_url, "/v1/embeddings", {"input": texts}))

    asking = ask()
    while not (await load_of(replicas.base_url))["num_running"]:
        if asking.done():  # answered before it was seen to run
            asking = ask()
    worker, _ = children(replicas.pid, "pagoda.worker.main")
    os.kill(worker, signal.SIGKILL)
    assert (await asking)["data"] == expected["data"]
