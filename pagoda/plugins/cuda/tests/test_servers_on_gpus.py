# SPDX-License-Identifier: Apache-2.0
"""Servers on emulated devices, in processes: replicas, workers on a Ray cluster, and blocks in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from feature_sets import Answer, ask
from ports import free_ports
from tiny_models import save_model

from benchmarks.ray_nodes import ray_cluster
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.policies import POLICIES
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams

BLOCK = 16
SAMPLING = SamplingParams(temperature=0.8, seed=1, max_tokens=2, logprobs=1)
PROMPTS = [[(7 * at + 31 * seed) % 300 for at in range(BLOCK + 3)] for seed in range(3)]


async def _served(
    model: Path, asked: Sequence[list[int]], count: int, executor: ExecutorOptions, host_bytes: int
) -> tuple[list[Answer], int]:
    """Answers to prompts, one after the other, of `count` engines that take turns; blocks that came from host
    memory. An engine has room for one prompt and a half."""
    engine = EngineOptions(
        backend="cuda",
        dtype="float32",
        block_size=BLOCK,
        num_kv_blocks=3,
        max_model_len=2 * BLOCK,
        max_num_seqs=1,
        kv_host_bytes=host_bytes or None,
        threads=1,
    )
    files = executor.resolve(engine, str(model), ParallelOptions())
    config = executor.engine_config(engine, files.model, ParallelOptions())
    engines = [EngineClient(config).replica for _ in range(count)]
    dispatcher = Dispatcher(engines, POLICIES["round-robin"])
    try:
        await dispatcher.start()
        answers = [
            await ask(
                dispatcher,
                GenerateRequest(request_id=str(at), prompt_token_ids=prompt, work=Work(SAMPLING)),
            )
            for at, prompt in enumerate(asked)
        ]
        report = await dispatcher.load()
        return answers, sum(tier.num_loaded for tier in report.tiers)
    finally:
        await dispatcher.close()


async def test_tiers_replicas_and_ray(tmp_path: Path) -> None:
    """Each prompt is asked twice of both engines, and its block is in host memory the second time."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'pagoda-llm[ray]')")
    save_model("qwen3", tmp_path)
    expected, _ = await _served(tmp_path, PROMPTS, 1, ExecutorOptions(), 0)
    with ray_cluster("127.0.0.1", free_ports(1, "")[0]) as cluster:
        cluster.add("127.0.0.2")
        executor = ExecutorOptions(executor="ray", ray_address=cluster.address)
        twice = [prompt for prompt in PROMPTS for _ in range(2)] * 2
        found, num_loaded = await _served(tmp_path, twice, 2, executor, 2**22)
    assert found == [answer for answer in expected for _ in range(2)] * 2
    assert num_loaded > 0
