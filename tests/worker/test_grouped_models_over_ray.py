# SPDX-License-Identifier: Apache-2.0
"""Models of several KV groups, split over two nodes of a Ray cluster: answers are those of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from family_models import make_model
from handoff_engines import ask_all
from ports import free_ports
from tiny_models import continuation

from benchmarks.ray_nodes import RayCluster, ray_cluster
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.policies import POLICIES
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams

pytest.importorskip("ray", reason="Ray is not installed (pip install 'pagoda-llm[ray]')")

HEAD, SECOND = "127.0.0.1", "127.0.0.2"
"""Two addresses, so that the nodes count as two hosts, which share no memory."""
COUNT = 12
"""Tokens of an answer."""
STATE_BLOCK = 64
"""Tokens of a block with a state: prefixes are found at multiples of it, at least."""
PROMPTS = [
    [random.Random(seed).randrange(320) for _ in range(230 - 31 * seed)] for seed in range(6)
]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is on another file system on the second node."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def cluster(disk: Path) -> Iterator[RayCluster]:
    with ray_cluster(HEAD, free_ports(1, "")[0]) as cluster:
        cluster.add(SECOND, own_disk=disk)
        yield cluster


def requests_for(prompts: Sequence[Sequence[int]]) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{index}",
            prompt_token_ids=list(prompt),
            work=Work(SamplingParams(temperature=0, seed=0, max_tokens=COUNT)),
        )
        for index, prompt in enumerate(prompts)
    ]


def dispatcher_over(
    cluster: RayCluster, directory: Path, ranks: dict[str, int], **options: Any
) -> Dispatcher:
    """One replica of the model in a directory, of so many ranks, one on each node."""
    parallel = ParallelOptions(
        tensor_parallel_size=ranks.get("tp", 1), pipeline_parallel_size=ranks.get("pp", 1)
    )
    settings = {"num_kv_blocks": 2000, **options}
    engine = EngineOptions(dtype="float32", max_model_len=256, threads=1, **settings)
    executor = ExecutorOptions(executor="ray", ray_address=cluster.address)
    files = executor.resolve(engine, str(directory), parallel)
    replica = EngineClient(executor.engine_config(engine, files.model, parallel)).replica
    return Dispatcher([replica], POLICIES["round-robin"])


@pytest.mark.parametrize(
    ("family", "ranks"), [("gemma3", {"tp": 2}), ("qwen3-next", {"tp": 2}), ("lfm2", {"pp": 2})]
)
async def test_answers_are_those_of_transformers(
    cluster: RayCluster, family: str, ranks: dict[str, int], tmp_path: Path
) -> None:
    """At first, and behind prefixes that are cached."""
    model = make_model(family)
    model.save_pretrained(tmp_path)
    expected = [continuation(model, prompt, COUNT) for prompt in PROMPTS]
    dispatcher = dispatcher_over(cluster, tmp_path, ranks)
    requests = requests_for(PROMPTS)
    try:
        await dispatcher.start()
        for _ in range(2):
            answers = await ask_all(dispatcher, requests)
            assert [answer.token_ids for answer in answers] == expected
        report = await dispatcher.load()
        findable = sum((len(prompt) - 1) // STATE_BLOCK * STATE_BLOCK for prompt in PROMPTS)
        assert report.num_prefix_hit_tokens >= findable
    finally:
        await dispatcher.close()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("gemma3", {"tp": 2}),
        ("qwen3-next", {"tp": 2}),
        ("deepseek-v2-lite", {"pp": 2}),
        ("lfm2", {"pp": 2}),
    ],
)
async def test_each_host_has_a_disk_of_its_own(
    cluster: RayCluster, disk: Path, family: str, ranks: dict[str, int], tmp_path: Path
) -> None:
    """Windows, states and latents, on a device that holds little: from disk, and so after a restart."""
    model = make_model(family)
    model.save_pretrained(tmp_path)
    expected = [continuation(model, prompt, COUNT) for prompt in PROMPTS]
    tier = {"kv_disk_path": str(disk), "kv_disk_bytes": 2**28, "kv_disk_min_touches": 1}
    loaded = []
    for _ in range(2):
        dispatcher = dispatcher_over(cluster, tmp_path, ranks, num_kv_blocks=112, **tier)
        try:
            await dispatcher.start()
            for number in range(2):
                answers = [
                    (await ask_all(dispatcher, [request]))[0].token_ids
                    for request in requests_for(PROMPTS)
                ]
                assert answers == expected, (family, number)
            [found] = (await dispatcher.load()).tiers
            loaded.append(found.num_loaded)
            assert found.num_failed == 0
        finally:
            await dispatcher.close()
    assert loaded[1] > 0
    [own] = [it for it in disk.iterdir() if model_named(it, tmp_path)]
    assert any(own.glob("??/*"))


def model_named(directory: Path, model: Path) -> bool:
    """True if blocks of a model are in a directory, of one rank: that of the other is on the other host."""
    manifest = json.loads((directory / "manifest.json").read_text())
    return bool(manifest["model"] == model.name)
