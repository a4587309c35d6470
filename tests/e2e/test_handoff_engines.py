"""An engine for prefill and one for decode give the tokens and log-probabilities of a single engine.

The embedded model runs in real engine and worker processes, the pod in the process of the test.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import cast

import psutil
import pytest
import pytest_asyncio
from handoff_pod import (
    BLOCK_SIZE,
    Answer,
    ask_all,
    engine_config,
    fetched,
    pod_of,
    requests,
    rounded,
    until_free,
)

from pagoda.frontend.endpoint import ReplicaState
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.replica import Replica
from pagoda.messages.frontend import GenerateRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES: dict[str, dict[str, object]] = {
    "P": {"role": "prefill"},
    "P small steps": {"role": "prefill", "max_num_batched_tokens": 56},
    "P tp2": {"role": "prefill", "tp": 2},
    "P pp2": {"role": "prefill", "pp": 2},
    "D": {"role": "decode"},
    "D small steps": {"role": "decode", "max_num_batched_tokens": 40},
    "D tp2": {"role": "decode", "tp": 2},
    "D over tcp": {"role": "decode", "transports": "tcp"},
    "P int8": {"role": "prefill", "kv_cache_dtype": "int8"},
    "D int8": {"role": "decode", "kv_cache_dtype": "int8"},
}
NUM_REQUESTS = 16

Engines = dict[str, Replica]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    key = tmp_path_factory.mktemp("cluster") / "key"
    key.write_bytes(os.urandom(16).hex().encode())
    started: Engines = {}
    for name, fields in ENGINES.items():
        options = dict(fields)
        config = engine_config(key, str(options.pop("role")), **options)
        started[name] = EngineClient(config).replica
    try:
        names = list(started)
        for pair in zip(names[::2], names[1::2], strict=True):
            await asyncio.gather(*(started[name].start() for name in pair))
        yield started
    finally:
        await asyncio.gather(*(engine.close() for engine in started.values()))


@pytest.fixture(scope="module")
def asked() -> list[GenerateRequest]:
    return requests(NUM_REQUESTS)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(engines: Engines, asked: list[GenerateRequest]) -> list[Answer]:
    """Answers of one engine that computes the prompts itself."""
    return await ask_all(engines["D"], asked, "alone")


def num_full_blocks(asked: list[GenerateRequest]) -> int:
    return sum((len(request.prompt_token_ids) - 1) // BLOCK_SIZE for request in asked)


TOPOLOGIES = {
    "1P1D": ["P", "D"],
    "1P2D": ["P", "D", "D small steps"],
    "2P1D": ["P", "P small steps", "D"],
    "chunked prompts": ["P small steps", "D small steps"],
    "P tp2, D tp1": ["P tp2", "D"],
    "P tp1, D tp2": ["P", "D tp2"],
    "P tp2, D tp2": ["P tp2", "D tp2"],
    "P pp2": ["P pp2", "D"],
    "P pp2, D tp2": ["P pp2", "D tp2"],
    "tcp": ["P", "P pp2", "D over tcp"],
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_answers_are_those_of_one_engine(
    engines: Engines, asked: list[GenerateRequest], expected: list[Answer], topology: str
) -> None:
    members = [engines[name] for name in TOPOLOGIES[topology]]
    decoders = [engines[name] for name in TOPOLOGIES[topology] if name.startswith("D")]
    before = [await fetched(engine) for engine in decoders]
    async with pod_of(members) as pod:
        answers = await ask_all(pod.dispatcher, asked, topology)
    after = [await fetched(engine) for engine in decoders]
    exact = "2" not in "".join(TOPOLOGIES[topology])
    assert (answers == expected) if exact else (rounded(answers) == rounded(expected))
    num_loaded = sum(a.num_loaded - b.num_loaded for a, b in zip(after, before, strict=True))
    assert num_loaded >= 0.9 * num_full_blocks(asked)
    assert all(a.num_failed == b.num_failed for a, b in zip(after, before, strict=True))
    await until_free(members)


async def test_quantised_kv(engines: Engines, asked: list[GenerateRequest]) -> None:
    members = [engines["P int8"], engines["D int8"]]
    expected = await ask_all(engines["D int8"], asked, "alone")
    async with pod_of(members) as pod:
        assert await ask_all(pod.dispatcher, asked, "int8") == expected
    assert (await fetched(members[1])).num_loaded > 0
    await until_free(members)


async def test_kv_of_another_kind_is_not_used(
    engines: Engines, asked: list[GenerateRequest], expected: list[Answer]
) -> None:
    members = [engines["P int8"], engines["D"]]
    before = await fetched(engines["D"])
    async with pod_of(members) as pod:
        assert await ask_all(pod.dispatcher, asked[:4], "mixed kinds") == expected[:4]
    assert (await fetched(engines["D"])).num_loaded == before.num_loaded
    await until_free([engines["D"]])


async def test_sixty_four_at_a_time(engines: Engines) -> None:
    many = requests(64, max_tokens=12)
    members = [engines["P"], engines["D"]]
    expected = await ask_all(engines["D"], many, "64 alone")
    async with pod_of(members) as pod:
        assert await ask_all(pod.dispatcher, many, "64") == expected
    await until_free(members)


@pytest.mark.parametrize("side", ["P", "D"])
async def test_prefixes_that_one_side_has(
    engines: Engines, asked: list[GenerateRequest], expected: list[Answer], side: str
) -> None:
    salt = f"known to {side}"
    members = [engines["P"], engines["D"]]
    await ask_all(engines[side], asked, salt)
    before = await fetched(engines["D"])
    async with pod_of(members) as pod:
        assert await ask_all(pod.dispatcher, asked, salt) == expected
    num_loaded = (await fetched(engines["D"])).num_loaded - before.num_loaded
    assert (num_loaded > 0) == (side == "P")
    await until_free(members)


def engine_pid(engine: Replica) -> int:
    pid = cast(EngineClient, engine.transport).engine_pid
    assert pid is not None
    return pid


def worker_pid(engine: Replica) -> int:
    [worker] = psutil.Process(engine_pid(engine)).children()
    return worker.pid


@pytest.mark.parametrize(
    ("name", "process", "share"),
    [
        ("P", "engine", 0.0),
        ("P", "engine", 0.5),
        ("P", "worker", 0.5),
        ("P", "worker", 0.9),
        ("D", "engine", 0.5),
        ("D", "engine", 0.9),
        ("D", "worker", 0.0),
        ("D", "worker", 0.5),
    ],
)
async def test_a_death_on_either_side_changes_no_token(
    engines: Engines,
    asked: list[GenerateRequest],
    expected: list[Answer],
    name: str,
    process: str,
    share: float,
) -> None:
    """A process is killed when this share of the KV has gone from one side to the other."""
    members = [engines["P"], engines["D"]]
    before = (await fetched(engines["D"])).num_loaded
    wanted = share * num_full_blocks(asked)
    async with pod_of(members) as pod:
        asking = asyncio.create_task(
            ask_all(pod.dispatcher, asked, f"{process} of {name} at {share}")
        )
        while (await fetched(engines["D"])).num_loaded < before + wanted:
            await asyncio.sleep(0.001)
        assert not asking.done()
        victim = (engine_pid if process == "engine" else worker_pid)(engines[name])
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        assert await asking == expected
        while engines[name].state is not ReplicaState.READY:
            await asyncio.sleep(0.01)
    await until_free(members)
