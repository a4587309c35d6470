# SPDX-License-Identifier: Apache-2.0
"""The order of a worker's start: weights, a profile of the largest step, and KV of what is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from family_models import FAMILIES, make_model
from tiny_models import save_model

from pagoda.backend.host import HostMemory
from pagoda.errors import ConfigError
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker import loading
from pagoda.worker.kv.sizing import measured_blocks, planned_blocks, share_of
from pagoda.worker.loading import LoadedWorker, load_runner, plan_worker
from pagoda.worker.memory_plan import WorkerMemoryPlan


class _Device(HostMemory):
    """Memory of so many bytes, of which some are taken by what a worker loads."""

    def __init__(self, free: int, *, on_host: bool = False) -> None:
        self.free = free
        self.on_host = on_host  # type: ignore[misc]

    def free_bytes(self) -> int:
        return self.free


def _config(directory: Path, **changes: Any) -> WorkerConfig:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "num_threads": 1}
    return WorkerConfig(model=str(directory), **sizes | changes)


def _plan(config: WorkerConfig, memory: HostMemory) -> WorkerMemoryPlan:
    """The plan of a worker whose backend has this memory."""
    plan = plan_worker(msgspec.structs.replace(config, num_blocks=16))
    plan.backend.memory = memory
    return replace(plan, config=config, available_bytes=share_of(memory, config))


def test_kv_comes_behind_weights_and_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen3", tmp_path)
    order: list[str] = []

    def noted(name: str) -> None:
        right = getattr(loading, name)

        def call(*args: Any, **options: Any) -> Any:
            order.append(name)
            return right(*args, **options)

        monkeypatch.setattr(loading, name, call)

    for name in ("WeightLoader", "profile_steps", "measured_blocks", "allocate_kv"):
        noted(name)
    asked: list[int] = []

    def agree(num_blocks: int) -> int:
        asked.append(num_blocks)
        return 12

    loaded = load_runner(plan_worker(_config(tmp_path)), Tracer("worker"), agree_on_kv=agree)
    assert order == ["WeightLoader", "profile_steps", "measured_blocks", "allocate_kv"]
    assert asked == [16]  # four blocks for each of four requests: more are of no use
    assert (loaded.ready.num_blocks, loaded.kv.num_blocks) == (12, 12)


def test_what_a_step_takes_is_not_for_kv(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    plan = _plan(_config(tmp_path, memory_utilization=1.0, max_num_seqs=256), HostMemory())
    block, spare = plan.bytes_per_block, 40
    held = plan.weight_bytes + plan.sampling_bytes + plan.step_bytes
    batch = plan.total_bytes(0, 0, 0) - plan.sampling_bytes
    plan = replace(plan, available_bytes=held + batch + spare * block)
    assert planned_blocks(plan) == spare
    assert measured_blocks(plan, 0, plan.step_bytes) == spare
    assert measured_blocks(plan, plan.weight_bytes + 7 * block, plan.step_bytes) == spare - 7
    assert measured_blocks(plan, 0, plan.step_bytes + 9 * block) == spare - 9
    with pytest.raises(ConfigError, match="one sequence may have 64"):
        measured_blocks(plan, 0, plan.step_bytes + 37 * block)
    with pytest.raises(ConfigError, match=r"^steps of 2048 tokens take .*--max-num-batched-tokens"):
        measured_blocks(plan, 0, plan.step_bytes + 41 * block)


def test_what_others_took_meanwhile_is_not_there(tmp_path: Path) -> None:
    """Of its own weights, free memory lacks what they took; they count once."""
    save_model("qwen3", tmp_path)
    memory = _Device(2**30, on_host=True)
    plan = _plan(_config(tmp_path, memory_utilization=1.0, max_num_seqs=256), memory)
    block, taken = plan.bytes_per_block, 2**20
    rest = plan.total_bytes(0, 0, 0)
    memory.free = 2**30 - taken
    undisturbed = measured_blocks(plan, taken, 0)
    assert undisturbed == 256 * 4  # all that requests can fill
    memory.free = rest + 50 * block
    assert measured_blocks(plan, taken, 0) == 50


def test_memory_of_a_host_is_shared_and_that_of_a_device_is_not(tmp_path: Path) -> None:
    config = _config(tmp_path, workers_on_host=4)
    assert share_of(_Device(1000, on_host=True), config) == 250
    assert share_of(_Device(1000), config) == 1000
    known = msgspec.structs.replace(config, host_memory_bytes=2000)
    assert share_of(_Device(1000, on_host=True), known) == 500
    assert share_of(_Device(1000), known) == 1000


def test_the_arena_does_not_lie_in_the_memory_of_a_device(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    sizes: dict[str, Any] = {"memory_utilization": 1.0, "max_num_seqs": 256}
    arena = 2**20
    plan = _plan(_config(tmp_path, kv_host_bytes=arena, **sizes), _Device(0))
    held = plan.weight_bytes + plan.step_bytes + plan.sampling_bytes
    plan = replace(plan, available_bytes=held + 30 * plan.bytes_per_block)
    assert planned_blocks(plan) == 30
    full = replace(plan, config=msgspec.structs.replace(plan.config, host_memory_bytes=arena))
    with pytest.raises(ConfigError, match=r"^--kv-host-bytes gives this worker 1.00 MiB"):
        planned_blocks(full)


def test_a_worker_that_replaces_another_takes_as_many_blocks(tmp_path: Path) -> None:
    """Also where less is free by now, or another number was asked for."""
    save_model("qwen3", tmp_path)
    memory = _Device(2**30, on_host=True)
    plan = _plan(_config(tmp_path, kept_blocks=33, num_blocks=16), memory)
    plan = replace(plan, available_bytes=plan.weight_bytes)
    memory.free = 0
    assert planned_blocks(plan) == measured_blocks(plan, plan.weight_bytes, 2**20) == 33
    with pytest.raises(ConfigError, match=r"^the weights of .* take"):
        planned_blocks(replace(plan, available_bytes=plan.weight_bytes - 1))


@pytest.mark.parametrize("family", [*FAMILIES])
def test_the_plan_reckons_with_what_steps_take(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    if backend != "cpu":
        pytest.skip("the kernels say what they take; functions take more than is seen")
    make_model(family).save_pretrained(tmp_path)
    profiled: list[int] = []
    right = loading.measured_blocks

    def measured(plan: WorkerMemoryPlan, taken_bytes: int, step_bytes: int) -> int:
        profiled.append(step_bytes)
        return right(plan, taken_bytes, step_bytes)

    monkeypatch.setattr(loading, "measured_blocks", measured)
    plan = plan_worker(_config(tmp_path, max_model_len=512))
    load_runner(plan, Tracer("worker"))
    assert profiled[0] <= plan.step_bytes <= 2.5 * profiled[0]


def _loaded(directory: Path, **changes: Any) -> LoadedWorker:
    return load_runner(plan_worker(_config(directory, **changes)), Tracer("worker"))


def test_both_figures_of_memory_are_told(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    small, large = (_loaded(tmp_path, num_blocks=count).ready for count in (16, 116))
    block = 2 * 2 * 2 * 32 * 16 * 4  # K and V, layers, heads, head size, tokens, bytes
    assert large.planned_memory_bytes - small.planned_memory_bytes == 100 * block
    assert small.taken_memory_bytes > 16 * block
