# SPDX-License-Identifier: Apache-2.0
"""Manifests that tell the blocks of one model from those of another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf_models import Kind, save_gguf
from tiny_models import make_model, save_model

from pagoda.backend.base import KVCache
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.plugins.disk_tier.manifest import make_manifest
from pagoda.plugins.disk_tier.objects import Manifest
from pagoda.worker.backends import choose_backend
from pagoda.worker.kv.manifest import kv_digest
from pagoda.worker.kv.store import HostKVStore
from pagoda.worker.loading import plan_worker
from pagoda.worker.memory_plan import WorkerMemoryPlan


def _plan(model: Path | str, **options: Any) -> tuple[WorkerMemoryPlan, list[KVCache]]:
    config = WorkerConfig(
        model=str(model), **{"num_blocks": 64, "max_num_seqs": 4, "num_threads": 1} | options
    )
    plan = plan_worker(config)
    backend, _ = choose_backend(config.backend)
    shape = plan.block_size, plan.shard.num_kv_heads, plan.shard.config.head_dim
    caches = [
        backend.allocate_kv_cache(plan.num_blocks, *shape, plan.dtype, plan.kv_dtype)
        for _ in plan.shard.layers
    ]
    return plan, caches


def _manifest(model: Path | str, **options: Any) -> Manifest:
    plan, caches = _plan(model, **options)
    backend, _ = choose_backend(plan.config.backend)
    return make_manifest(plan, HostKVStore(caches), backend.arithmetic)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen3", directory)
    return directory


def _digest(model: Path | str, **options: Any) -> str:
    plan, caches = _plan(model, **options)
    return kv_digest(plan, HostKVStore(caches))


def test_engines_of_any_topology_mean_the_same_by_their_kv(model: Path) -> None:
    shapes = [_shape(1, 1), _shape(2, 1), _shape(1, 2), _shape(4, 1)]
    places = [(shape, place) for shape in shapes for place in shape.places(0)]
    digests = {_digest(model, parallel=shape, place=place) for shape, place in places}
    assert len(digests) == 1


OTHER_BYTES: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"kv_cache_dtype": "int8"},
    {"block_size": 32},
    {"quantization": "int8"},
    {"load_format": "dummy"},
]


@pytest.mark.parametrize("options", OTHER_BYTES, ids=str)
def test_engines_of_another_kind_mean_something_else(model: Path, options: dict[str, Any]) -> None:
    assert _digest(model, **options) != _digest(model)


@pytest.mark.parametrize("options", [*OTHER_BYTES, {"backend": "reference"}], ids=str)
def test_whatever_changes_the_bytes_changes_the_digest(
    model: Path, options: dict[str, Any]
) -> None:
    assert _manifest(model, **options).digest != _manifest(model).digest


def test_a_copy_finds_the_blocks_of_the_original(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "under another name"
    shutil.copytree(model, copy)
    assert _manifest(copy).digest == _manifest(model).digest
    assert _manifest(copy).model == "under another name"


def _shape(tp: int, pp: int, *, experts: bool = False) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, expert_parallel=experts
    )


def test_every_rank_of_every_topology_has_a_directory_of_its_own(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path)
    shapes = [_shape(1, 1), _shape(2, 1), _shape(2, 1, experts=True), _shape(1, 2), _shape(2, 2)]
    places = [(shape, place) for shape in shapes for place in shape.places(0)]
    digests = {_manifest(tmp_path, parallel=shape, place=place).digest for shape, place in places}
    assert len(digests) == len(places) == 11
    assert _manifest(tmp_path, place=RankPlace(dp=3)).digest in digests  # replicas share one


def test_gguf_files_are_told_by_what_they_hold(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.gguf", "copy.gguf", "other.gguf")]
    save_gguf(make_model("qwen3"), paths[0], lambda _: Kind.Q8_0)
    shutil.copy(paths[0], paths[1])
    content = bytearray(paths[0].read_bytes())
    content[-1] ^= 1
    paths[2].write_bytes(content)
    digests = [_manifest(path).digest for path in paths]
    assert digests[0] == digests[1] != digests[2]


def test_dummy_weights_are_told_by_shape_and_seed(model: Path) -> None:
    digests = {
        _manifest(model).digest,
        _manifest(model, load_format="dummy").digest,
        _manifest(model, load_format="dummy", seed=1).digest,
    }
    assert len(digests) == 3
