from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import finish

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.checkpoints.model_config import ModelConfig
from pagoda.checkpoints.presets import PRESETS
from pagoda.cli import machine_facts
from pagoda.cli.machine_facts import measure_read_bandwidth
from pagoda.cli.weight_traffic import gguf_traffic, stored_traffic, weight_traffic


def config(name: str, **changes: object) -> ModelConfig:
    return parse_model_config({**PRESETS[name], **changes}, source="config")


def test_weight_traffic_of_a_known_model() -> None:
    traffic = weight_traffic(config("qwen3-0.6b"), "auto")
    assert traffic.dtype == "bfloat16"
    assert traffic.num_bytes == pytest.approx(2 * 596e6, rel=0.001)
    assert weight_traffic(config("qwen3-0.6b"), "float32").num_bytes == 2 * traffic.num_bytes


def test_weight_traffic_of_experts_is_that_of_one_token() -> None:
    # 3.3 billion weights take part in a token; of the embedding table, 0.3 billion, it is one row.
    traffic = weight_traffic(config("qwen3-30b-a3b"), "auto", "int8")
    assert round(traffic.num_bytes / 1e8) == 30
    dense = config("qwen3-30b-a3b", mlp_only_layers=list(range(48)))
    # The dense layers of this shape are as wide as eight experts.
    routers = 2 * 48 * 2048 * 128
    assert weight_traffic(dense, "bfloat16").num_bytes == 2 * traffic.num_bytes - routers
    assert round(weight_traffic(config("mixtral-8x7b"), "auto").num_bytes / 2e9) == 13


def test_weight_traffic_of_quantized_weights(tmp_path: Path) -> None:
    head = 151_936 * 1024
    int8 = weight_traffic(config("qwen3-0.6b"), "auto", "int8")
    assert (int8.num_bytes, int8.dtype) == (pytest.approx(596e6, rel=0.001), "int8")
    int4 = weight_traffic(config("qwen3-0.6b"), "auto", "int4")
    assert int4.num_bytes - head == pytest.approx((int8.num_bytes - head) * 4.5 / 8, rel=1e-6)
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "b.safetensors").write_bytes(bytes(2**20))
    apart = config("qwen3-0.6b", tie_word_embeddings=False, vocab_size=2)
    assert stored_traffic(apart, tmp_path).num_bytes == 1000 + 2**20 - 2 * 1024 * 2
    assert stored_traffic(config("qwen3-0.6b"), tmp_path).num_bytes == 1000 + 2**20


def test_cpuinfo_of_both_families() -> None:
    x86 = "model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16 sse\n"
    assert machine_facts.cpu_name(x86) == "AMD EPYC"
    assert machine_facts.instruction_sets(x86) == ["avx2", "avx512f", "avx512_bf16"]
    arm = "Features\t: fp asimd i8mm bf16 sve\n"
    assert machine_facts.instruction_sets(arm) == ["asimd", "bf16", "i8mm", "sve"]
    assert machine_facts.instruction_sets("") == []


def test_accelerators_are_what_the_vendor_tools_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_facts.accelerators() == []
    for name, text in (
        ("nvidia-smi", "NVIDIA L4, 23034 MiB"),
        ("npu-smi", "Total Count : 2\nNPU ID : 0\nNPU ID : 1"),
    ):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\nprintf '%s\\n' '{text}'\n")
        tool.chmod(0o755)
    found = machine_facts.accelerators()
    assert found == ["NVIDIA GPU: NVIDIA L4, 23034 MiB", "Ascend NPU 0", "Ascend NPU 1"]


def test_the_largest_cache_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, size in enumerate(("32K", "1024K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(machine_facts, "_CACHES", tmp_path)
    assert machine_facts.last_level_cache_bytes() == 2**25
    monkeypatch.setattr(machine_facts, "_CACHES", tmp_path / "none")
    assert machine_facts.last_level_cache_bytes() == 0


def test_cores_are_counted() -> None:
    assert re.fullmatch(
        r"\d+ of \d+ allowed by affinity, container quota (none|\S+)", machine_facts.cores()
    )


def test_bandwidth_is_measured_on_buffers_beyond_the_caches() -> None:
    bandwidth = measure_read_bandwidth(1, memory_bytes=2**30)
    assert bandwidth.buffer_bytes >= 2**26
    assert bandwidth.threads == 1
    assert bandwidth.bytes_per_s > 0


def test_weight_traffic_of_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    q4 = gguf.GGMLQuantizationType.Q4_0
    for name in ("token_embd", "output"):
        packed = gguf.quantize(np.ones((100, 64), dtype=np.float32), q4)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=q4)
    writer.add_tensor("blk.0.ffn_up.weight", np.ones((64, 64), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    finish(writer)
    file = read_gguf(tmp_path / "m.gguf")
    traffic = gguf_traffic(file, "auto")
    assert traffic.dtype == "Q4_0"
    assert traffic.num_bytes == 100 * 64 * 4.5 / 8 + 64 * 64 * 2
    assert gguf_traffic(file, "float32").num_bytes == traffic.num_bytes + 64 * 64 * 2
