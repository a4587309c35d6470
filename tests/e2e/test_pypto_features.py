# SPDX-License-Identifier: Apache-2.0
"""Features that go with the model of the Ascend device: answers are those of the reference, in every bit."""

from __future__ import annotations

import asyncio
import shutil
from itertools import product
from pathlib import Path

import pytest
from feature_models import TOKENIZER
from feature_sets import Answer, Featured, ask, asked
from ports import free_ports
from quantized_models import fp8_tensors_format, store_quantized
from transformers import AutoModelForCausalLM

from benchmarks.pypto.device import installed, violations
from benchmarks.pypto.serving import PAGE
from benchmarks.ray_nodes import ray_cluster
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.policies import POLICIES
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.speculation import OFF

FEATURES = ("grammars", "tools", "log-probabilities", "n > 1", "prefix cache")


async def _answers(
    of: Featured, count: int, executor: ExecutorOptions | None = None
) -> list[Answer]:
    """Of `count` engines, among which requests are shared out."""
    engine = EngineOptions(
        backend=of.backend,
        dtype="float32",
        block_size=PAGE,
        num_kv_blocks=32,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=160,
        threads=1,
    )
    executor = executor or ExecutorOptions()
    files = executor.resolve(engine, str(of.model), ParallelOptions())
    config = executor.engine_config(engine, files.model, ParallelOptions())
    engines = [EngineClient(config).replica for _ in range(count)]
    dispatcher = Dispatcher(engines, POLICIES["round-robin"])
    try:
        await dispatcher.start()
        return list(await asyncio.gather(*(ask(dispatcher, it) for it in asked(of))))
    finally:
        await dispatcher.close()


async def test_features_of_requests_and_replicas(tmp_path: Path) -> None:
    expected = await _answers(Featured(TOKENIZER.parent, "reference", OFF, {}, FEATURES), 1)
    with installed(log=str(tmp_path)):
        of = Featured(TOKENIZER.parent, "pypto", OFF, {}, FEATURES)
        assert await _answers(of, 2) == expected
    assert violations(tmp_path) == []


async def test_files_in_8_bit_floats_are_dense_once_loaded(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(TOKENIZER.parent, dtype="float32")
    meant, _ = store_quantized(model, tmp_path / "files", fp8_tensors_format("channel"))
    meant.save_pretrained(tmp_path / "dense")
    for name, place in product(
        ("tokenizer", "tokenizer_config", "generation_config"), ("files", "dense")
    ):
        shutil.copy(TOKENIZER.with_name(f"{name}.json"), tmp_path / place)
    expected = await _answers(Featured(tmp_path / "dense", "reference", OFF, {}, ()), 1)
    with installed(log=str(tmp_path)):
        assert await _answers(Featured(tmp_path / "files", "pypto", OFF, {}, ()), 1) == expected


async def test_a_worker_on_a_ray_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'pagoda-llm[ray]')")
    expected = await _answers(Featured(TOKENIZER.parent, "reference", OFF, {}, ()), 1)
    of = Featured(TOKENIZER.parent, "pypto", OFF, {}, ())
    with installed(log=str(tmp_path)), ray_cluster("127.0.0.1", free_ports(1, "")[0]) as cluster:
        cluster.add("127.0.0.2")
        executor = ExecutorOptions(executor="ray", ray_address=cluster.address)
        assert await _answers(of, 1, executor) == expected
    assert violations(tmp_path) == []
