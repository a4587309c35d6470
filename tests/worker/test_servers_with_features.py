# SPDX-License-Identifier: Apache-2.0
"""Servers with sets of features: answers are those of an engine that does nothing but compute, in every bit.

Prompts are computed by one engine and handed over to two others, among which requests are shared out; the workers
of all of them run on a Ray cluster, and keep blocks in host memory.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from feature_sets import Featured, answers, ask, asked, featured
from handoff_engines import LEASE_S, pod_of, until_free
from ports import free_ports

from benchmarks.ray_nodes import RayCluster, ray_cluster
from pagoda.fleet.engine_client import EngineClient
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.engine_config import EngineConfig
from pagoda.plugins.disaggregation.options import HandoffOptions
from tools.features import SERVER_SETS

pytest.importorskip("ray", reason="Ray is not installed (pip install 'pagoda-llm[ray]')")

HEAD, SECOND = "127.0.0.1", "127.0.0.2"
"""Two addresses, so that the nodes count as two hosts, which share no memory."""
MAX_WORKERS = 6
"""Of three engines."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(HEAD, free_ports(1, "")[0]) as cluster:
        cluster.add(SECOND, num_cpus=MAX_WORKERS)
        yield cluster


def config(
    of: Featured, role: Literal["prefill", "decode"], key: Path, address: str
) -> EngineConfig:
    """One engine with few blocks, some of which are found in host memory again."""
    numbers = of.numbers
    parallel = ParallelOptions(
        tensor_parallel_size=numbers["tp"],
        pipeline_parallel_size=2 if "pipeline parallelism" in of.features else 1,
        enable_expert_parallel=numbers["experts"],
    )
    engine = EngineOptions(
        backend=of.backend,
        dtype=numbers["dtype"],
        quantization=numbers["quantization"],
        kv_cache_dtype=numbers["kv_cache_dtype"],
        block_size=numbers["block_size"],
        lora=tuple(f"{it.name}={it.path}" for it in numbers.get("adapters", ())),
        speculative_config=json.dumps(msgspec.to_builtins(of.speculation)),
        max_model_len=96,
        max_num_seqs=16,
        max_num_batched_tokens=2048 if "encoders" in of.features else 64,
        num_kv_blocks=12 if numbers["block_size"] == 16 else 8,
        kv_host_bytes=2**24,
        threads=1,
    )
    handoff = HandoffOptions(role=role, kv_transports="tcp", kv_lease=LEASE_S).config(
        cluster_key_file=key, advertise=HEAD, num_replicas=1
    )
    executor = ExecutorOptions(executor="ray", ray_address=address)
    files = executor.resolve(engine, str(of.model), parallel)
    return executor.engine_config(engine, files.model, parallel, handoff)


@pytest.mark.parametrize("number", range(len(SERVER_SETS)))
async def test_servers_with_features(number: int, cluster: RayCluster, tmp_path: Path) -> None:
    of = featured(SERVER_SETS[number], tmp_path, number)
    requests, alone, key = asked(of), of.plain(), tmp_path / "key"
    expected = [answers(alone, [it])[it.request_id] for it in requests]
    key.write_bytes(os.urandom(16).hex().encode())
    engines = [
        EngineClient(config(of, role, key, cluster.address)).replica
        for role in ("prefill", "decode", "decode")
    ]
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        async with pod_of(engines) as pod:
            for _ in range(2):
                found = await asyncio.gather(*(ask(pod.dispatcher, it) for it in requests))
                assert list(found) == expected
        tiers = [tier for engine in engines for tier in (await engine.load()).tiers]
        if "encoders" not in of.features:  # which keep nothing
            for name in ("host", "remote"):
                assert sum(tier.num_loaded for tier in tiers if tier.name == name) > 0
        await until_free(engines)
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
