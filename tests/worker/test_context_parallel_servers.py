# SPDX-License-Identifier: Apache-2.0
"""Servers whose requests lie on several ranks, on one host or two: answers are those of one rank, in every bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from family_models import make_model
from handoff_engines import ask_all
from in_process import InProcessEngine
from ports import free_ports

from benchmarks.ray_nodes import RayCluster, ray_cluster
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.policies import POLICIES
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.parallel.config import RankPlace

pytest.importorskip("ray", reason="Ray is not installed (pip install 'pagoda-llm[ray]')")

HEAD, SECOND = "127.0.0.1", "127.0.0.2"
"""Two addresses, so that the nodes count as two hosts, which share no memory."""
SEGMENT = 128
LONGEST = 512
BLOCKS = LONGEST // 16 // 2
"""Blocks of a rank: half of those of the longest request."""

CASES: dict[str, tuple[str, dict[str, int]]] = {
    "two Ray nodes": ("ray", {}),
    "replicas": ("local", {"data_parallel_size": 2}),
    "tensor parallelism": ("local", {"tensor_parallel_size": 2}),
    "pipeline parallelism": ("local", {"pipeline_parallel_size": 2}),
}
"""Executor, and further ranks."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(HEAD, free_ports(1, "")[0]) as cluster:
        cluster.add(SECOND)
        yield cluster


@pytest.mark.parametrize("case", CASES)
async def test_answers_are_those_of_one_rank(
    request: pytest.FixtureRequest, tmp_path: Path, case: str
) -> None:
    executor, ranks = CASES[case]
    make_model("olmo2").save_pretrained(tmp_path)
    rng = random.Random(0)
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=12)
    requests = [
        GenerateRequest(
            request_id=str(length),
            prompt_token_ids=[rng.randrange(320) for _ in range(length)],
            work=Work(sampling),
        )
        for length in (5, 120, 300, LONGEST - 12)
    ]
    alone = InProcessEngine(
        tmp_path, backend="cpu", dtype="float32", max_model_len=LONGEST, segment_tokens=SEGMENT
    )
    expected = alone.answer(requests)
    parallel = ParallelOptions(context_parallel_size=2, **ranks)
    engine = EngineOptions(
        dtype="float32", max_model_len=LONGEST, num_kv_blocks=BLOCKS, block_size=16, threads=1
    )
    address = request.getfixturevalue("cluster").address if executor == "ray" else None
    options = ExecutorOptions(executor=executor, ray_address=address)
    files = options.resolve(engine, str(tmp_path), parallel)
    config = options.engine_config(engine, files.model, parallel)
    replicas = []
    for dp in range(config.worker.parallel.data_parallel_size):
        worker = msgspec.structs.replace(config.worker, segment_tokens=SEGMENT, place=RankPlace(dp))
        replicas.append(EngineClient(msgspec.structs.replace(config, worker=worker)).replica)
    dispatcher = Dispatcher(replicas, POLICIES["round-robin"])
    try:
        await dispatcher.start()
        for _ in range(2):
            answers = await ask_all(dispatcher, requests)
            assert [answer.token_ids for answer in answers] == expected
        report = await dispatcher.load()
        assert report.num_blocks == 2 * BLOCKS * len(replicas)
        assert report.num_prefix_hit_tokens > 0
    finally:
        await dispatcher.close()
