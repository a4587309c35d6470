# SPDX-License-Identifier: Apache-2.0
"""The arguments of `LLM` become engine configurations, as the flags do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from adapter_files import save_adapter_of

from pagoda.checkpoints.resolve import load_model_config
from pagoda.errors import ConfigError
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions
from pagoda.llm.llm_arguments import configure
from pagoda.messages.speculation import SpeculativeConfig
from pagoda.parallel.config import ParallelConfig

DUMMY = {"load_format": "dummy"}


def test_no_arguments_are_the_defaults_of_the_flags() -> None:
    files, engine, _ = configure("qwen3-0.6b", DUMMY)
    assert engine == EngineOptions(load_format="dummy").engine_config(files.model)


FIELDS = {field.name for field in dataclasses.fields(EngineOptions)} - {"enable_chunked_prefill"}


def test_chunked_prefill_is_always_on() -> None:
    on = {**DUMMY, "enable_chunked_prefill": True}
    assert configure("qwen3-0.6b", on) == configure("qwen3-0.6b", DUMMY)
    with pytest.raises(
        ConfigError, match=r"^--no-enable-chunked-prefill is not there: prompts are"
    ):
        configure("qwen3-0.6b", {**DUMMY, "enable_chunked_prefill": False})


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_every_flag_is_an_argument(field: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float16",
        "quantization": "int8",
        "quantization_group_size": 64,
        "quantization_calibration": str(Path(__file__)),
        "kv_cache_dtype": "int8",
        "backend": "reference",
        "kv_cache_memory_bytes": "2GiB",
        "memory_utilization": 0.25,
        "speculative_config": '{"method": "suffix", "num_speculative_tokens": 5}',
        "spec_type": "ngram-simple",
        "model_draft": "qwen3-0.6b",
        "enable_prefix_caching": False,
        "kv_events": "tcp://127.0.0.1:5557",
        "kv_host_bytes": "2GiB",
        "kv_disk_path": "kv",
        "kv_disk_bytes": "1MiB",
        "kv_load_failure": "fail",
        "pin_threads": True,
        "batch_invariant": False,
        "lora": (
            f"a={save_adapter_of(load_model_config('qwen3-0.6b', 'dummy'), tmp_path, rank=1)}",
        ),
    }
    disk = {"kv_disk_path": "kv", "kv_disk_bytes": "1MiB"}
    others: dict[str, dict[str, Any]] = {
        "quantization_group_size": {"quantization": "int4"},
        "quantization_calibration": {"quantization": "int8"},
        "kv_disk_path": disk,
        "kv_disk_bytes": disk,
        "kv_disk_min_touches": disk,
        "kv_load_failure": disk,
    }
    needed = others.get(field, {})
    given: dict[str, Any] = {**DUMMY, **needed, field: values.get(field, 7)}
    files, engine, _ = configure("qwen3-0.6b", given)
    assert engine == EngineOptions(**given).engine_config(files.model)
    default = EngineOptions().engine_config(files.model)
    assert engine != default


@pytest.mark.parametrize(
    ("theirs", "ours", "value"),
    [
        ("gpu_memory_utilization", "memory_utilization", 0.9),
        ("num_gpu_blocks_override", "num_kv_blocks", 12),
    ],
)
def test_names_of_vllm(theirs: str, ours: str, value: Any) -> None:
    assert configure("qwen3-0.6b", {**DUMMY, theirs: value}) == configure(
        "qwen3-0.6b", {**DUMMY, ours: value}
    )


def test_json_of_a_flag_may_be_a_mapping() -> None:
    config: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 4}
    _, engine, _ = configure("qwen3-0.6b", {**DUMMY, "speculative_config": config})
    assert engine.speculation == SpeculativeConfig(**config)
    with pytest.raises(
        ConfigError, match=r"^--speculative-config: there is no key models; there are method,"
    ):
        configure("qwen3-0.6b", {**DUMMY, "speculative_config": {"models": "a"}})


def test_parallel_sizes_are_arguments() -> None:
    sizes: dict[str, Any] = {"tensor_parallel_size": 2, "pp": 3, "data_parallel_size": 1}
    _, engine, _ = configure("qwen3-0.6b", {**DUMMY, **sizes})
    expected = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert engine.worker.parallel == expected


@pytest.mark.parametrize("devices", ["cpu:1,cpu:0", ["cpu:1", "cpu:0"], ("cpu:1", "cpu:0")])
def test_devices_are_a_list_or_its_spelling(devices: Any) -> None:
    _, engine, _ = configure("qwen3-0.6b", {**DUMMY, "tp": 2, "devices": devices})
    parallel = engine.worker.parallel
    assert [str(parallel.devices_of(place)) for place in parallel.places(0)] == ["cpu:1", "cpu:0"]
    assert engine.worker.workers_on_host == 2
    assert engine.worker.host_memory_bytes


def test_arguments_of_vllm_that_ask_for_what_is_done_anyway() -> None:
    neutral = {
        "tensor_parallel_size": 1,
        "tokenizer": "qwen3-0.6b",
        "trust_remote_code": False,
        "enforce_eager": True,
        "quantization": None,
    }
    assert configure("qwen3-0.6b", {**DUMMY, **neutral}) == configure("qwen3-0.6b", DUMMY)


def test_the_simulated_executor_takes_the_flags_too() -> None:
    arguments: dict[str, Any] = {"executor": "sim", "sim_base_ms": 2, "max_model_len": 99}
    files, engine, _ = configure(None, arguments)
    executor = ExecutorOptions(executor="sim", sim_base_ms=2.0)
    assert files == executor.resolve(EngineOptions(), None)
    assert engine == executor.engine_config(EngineOptions(max_model_len=99), files.model)
