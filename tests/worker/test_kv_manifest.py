"""What tells the blocks of one model from those of another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_model

from pagoda.engine.messages import WorkerConfig
from pagoda.kv.objects import Manifest
from pagoda.worker.kv_manifest import make_manifest
from pagoda.worker.kv_memory import KVMemory
from pagoda.worker.loading import load_runner, plan_worker


def _manifest(model: Path | str, **options: Any) -> Manifest:
    config = WorkerConfig(
        model=str(model), **{"num_blocks": 64, "max_num_seqs": 4, "num_threads": 1} | options
    )
    plan = plan_worker(config)
    loaded = load_runner(plan)
    return make_manifest(plan, KVMemory(loaded.caches), loaded.ready.arithmetic)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen3", directory)
    return directory


def test_a_copy_finds_the_blocks_of_the_original(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "under another name"
    shutil.copytree(model, copy)
    assert _manifest(copy).digest == _manifest(model).digest
    assert _manifest(copy).model == "under another name"


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"block_size": 32},
        {"quantization": "int8"},
        {"backend": "reference"},
    ],
    ids=str,
)
def test_whatever_changes_the_bytes_changes_the_digest(
    model: Path, options: dict[str, Any]
) -> None:
    assert _manifest(model, **options).digest != _manifest(model).digest


def test_other_weights_in_the_same_place_have_another_digest(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    before = _manifest(copy).digest
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert _manifest(copy).digest != before


def test_dummy_weights_are_told_by_shape_and_seed(model: Path) -> None:
    digests = {
        _manifest(model).digest,
        _manifest(model, load_format="dummy").digest,
        _manifest(model, load_format="dummy", seed=1).digest,
    }
    assert len(digests) == 3
