# SPDX-License-Identifier: Apache-2.0
"""Models of several KV groups, split over two nodes of a Ray cluster: answers are those of transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

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
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(HEAD, free_ports(1, "")[0]) as cluster:
        cluster.add(SECOND)
        yield cluster


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
    parallel = ParallelOptions(
        tensor_parallel_size=ranks.get("tp", 1), pipeline_parallel_size=ranks.get("pp", 1)
    )
    engine = EngineOptions(dtype="float32", max_model_len=256, num_kv_blocks=2000, threads=1)
    executor = ExecutorOptions(executor="ray", ray_address=cluster.address)
    files = executor.resolve(engine, str(tmp_path), parallel)
    replica = EngineClient(executor.engine_config(engine, files.model, parallel)).replica
    dispatcher = Dispatcher([replica], POLICIES["round-robin"])
    requests = [
        GenerateRequest(
            request_id=f"r{index}",
            prompt_token_ids=prompt,
            work=Work(SamplingParams(temperature=0, seed=0, max_tokens=COUNT)),
        )
        for index, prompt in enumerate(PROMPTS)
    ]
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
