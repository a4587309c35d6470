# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import finish
from system_trees import write_system

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli import machine_facts
from pagoda.cli.doctor import doctor
from pagoda.cli.machine_facts import measure_read_bandwidth
from pagoda.cli.model_report import context_rows, model_facts
from pagoda.cli.weight_traffic import weight_traffic


def config(name: str, **changes: object) -> ModelSpec:
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


def test_weight_traffic_of_quantized_weights() -> None:
    head = 151_936 * 1024
    int8 = weight_traffic(config("qwen3-0.6b"), "auto", "int8")
    assert (int8.num_bytes, int8.dtype) == (pytest.approx(596e6, rel=0.001), "int8")
    int4 = weight_traffic(config("qwen3-0.6b"), "auto", "int4")
    assert int4.num_bytes - head == pytest.approx((int8.num_bytes - head) * 4.5 / 8, rel=1e-6)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    stored = weight_traffic(config("qwen3-0.6b", quantization_config=gptq), "auto")
    layers = int8.num_bytes - head
    assert stored.num_bytes == layers * (4 + 16 / 128) / 8 + 2 * head
    assert stored.dtype == "gptq int4 weights (groups of 128)"


def test_weights_of_fp8_checkpoints_take_what_the_backend_makes_of_them() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    said = dict(model_facts(config("qwen3-4b", quantization_config=fp8), "auto"))["weights"]
    assert said.startswith(
        "7.49 GiB in bfloat16, 4.21 GiB as stored (fp8 weights (blocks of 128 × 128)) where the backend has fp8, "
    )


def test_windows_give_kv_back() -> None:
    windowed = {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131_072,
        "hidden_act": "gelu_pytorch_tanh",
    }
    said = dict(model_facts(config("qwen3-4b", **windowed), "auto"))["KV cache"]
    assert said.startswith("136 KiB a token in 16 bits, about half in int8; ")
    assert " at 32,768 tokens, 0.17 of it" in said
    full = dict(model_facts(config("qwen3-4b"), "auto"))["KV cache"]
    assert full.endswith("a token in 16 bits, about half in int8")


def test_a_worker_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[3:])
        return subprocess.CompletedProcess(command, 0, "cpu: some line\ncpu (avx2)\n", "")

    monkeypatch.setattr("pagoda.cli.doctor.subprocess.run", run)
    monkeypatch.setattr("pagoda.cli.machine_facts.accelerators", list)
    assert (doctor(), doctor("qwen3-0.6b")) == (0, 0)
    assert asked == [[], ["qwen3-0.6b", "dummy", "auto", "none"]]


def test_threads_and_nodes_of_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine_facts, "available_cores", lambda: 8)
    system = write_system(
        tmp_path,
        {
            "system/cpu/online": "0-7\n",
            "cpu_core/cpus": "0-3\n",
            "cpu_atom/cpus": "4-7\n",
            "system/node/node0/cpulist": "0-1,4-5\n",
            "system/node/node1/cpulist": "2-3,6-7\n",
        },
    )
    threads, said = machine_facts.worker_threads(system)
    assert threads == 4
    assert said.startswith(
        f"4 for a worker, on the fast cores 0-3: {system}/cpu_atom/cpus tells them from 4-7; "
    )
    assert machine_facts.nodes(system).startswith(
        "2, of the cores 0-1,4-5; 2-3,6-7: --tp 2 --devices cpu:0,cpu:1 "
    )
    assert machine_facts.nodes(tmp_path / "nothing") == "1"
    assert machine_facts.worker_threads(tmp_path / "nothing")[0] == 8


def test_a_model_that_can_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("pagoda-tiny", threads=1) == 0
    said = capsys.readouterr().out
    parts = (
        "family",
        "KV cache",
        "context",
        "tools shown; calls shown",
        "of memory with a KV cache of ",
    )
    for words in (*parts, "pagoda-tiny can be served with "):
        assert words in said


def test_memory_of_drafting_is_told_where_there_is_drafting() -> None:
    """Recent answers of 32 API keys, of 65,536 tokens of 20 bytes each."""
    said = dict(model_facts(config("qwen3-4b"), "auto"))
    assert said["drafts"] == (
        "12 B of the engine a token of a running request, and at most 40.0 MiB for recent answers"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architectures": ["Qwen3VisionForCausalLM"]},
            "architecture 'Qwen3VisionForCausalLM' is not supported; the nearest that are supported are Qwen3",
        ),
        ({"n_routed_experts": 8}, "n_routed_experts is not supported; it must be absent or 0"),
        (
            {"attention_multiplier": 2},
            "attention_multiplier is not supported; it must be absent or",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "norm.weight has no place in the LlamaForCausalLM that config.json calls for.",
        ),
        ({"num_hidden_layers": 99}, "lacks the tensor model.layers."),
        ({"vocab_size": 10**9}, " are free; split it over several hosts"),
    ],
)
def test_models_that_cannot_be_served(
    changes: dict[str, object], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = resolve_model(None).directory
    assert source is not None
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    values = json.loads((source / "config.json").read_bytes())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    assert doctor(str(tmp_path), threads=1) == 1
    said = capsys.readouterr().out
    assert f"{tmp_path} cannot be served: " in said
    assert sentence in said


def test_a_gguf_file_that_lacks_a_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    _write_gguf(path, ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down"))
    assert doctor(str(path), threads=1) == 1
    assert "m.gguf lacks the tensor blk.0.ffn_up.weight, which" in capsys.readouterr().out


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
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    _write_gguf(tmp_path / "m.gguf", layer)
    spec = gguf_model_config(read_gguf(tmp_path / "m.gguf"))
    traffic = weight_traffic(spec, "auto")
    assert traffic.dtype == "GGUF Q4_0 weights"
    assert traffic.num_bytes == 100 * 64 * 4.5 / 8 + len(layer) * 64 * 64 * 2
    assert weight_traffic(spec, "float32").num_bytes == traffic.num_bytes + len(layer) * 64 * 64 * 2


def _write_gguf(path: Path, layer: Sequence[str]) -> None:
    """A Llama of one layer, whose matrices are those named."""
    writer = gguf.GGUFWriter(path, "llama")
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
    for name in layer:
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((64, 64), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    finish(writer)


@pytest.mark.parametrize(
    ("architecture", "gives"),
    [
        ("BertModel", "vectors of texts (POST /v1/embeddings), of which"),
        ("BertForSequenceClassification", "scores of pairs of texts (POST /v1/rerank, /v1/score)"),
    ],
)
def test_what_an_encoder_gives(architecture: str, gives: str) -> None:
    shape = {"architectures": [architecture], "hidden_act": "gelu", "num_labels": 1}
    said = dict(model_facts(config("qwen3-0.6b", **shape), "auto"))
    assert said["gives"].startswith(gives)
    assert said["KV cache"].startswith("none is kept: ")
    assert "drafts" not in said
    assert "28 with attention both ways" in said["layers"]


def test_a_context_beyond_which_frequencies_are_others_is_told() -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "type": "longrope"}
    long = {"original_max_position_embeddings": 4096, "rope_scaling": factors}
    told = dict(model_facts(config("qwen3-0.6b", **long), "auto"))["context"]
    assert told == "40,960 tokens; above --max-model-len 4096 frequencies of all prompts are others"
    assert dict(model_facts(config("qwen3-0.6b"), "auto"))["context"] == "40,960 tokens"


def test_storeys_hold_a_context_together() -> None:
    spec = config("qwen3-0.6b")
    (memory, disk, both) = context_rows(spec, 2**30, 3 * 2**30, 8 * 2**30, 20e9)
    per_token = 2 * 28 * 8 * 128 * 2
    assert memory == ("memory", "2.00 GiB", f"{2 * 2**30 // per_token:,}", "57 ms at 20.0 GB/s")
    assert disk[2:] == (f"{8 * 2**30 // per_token:,}", "1,147 ms at 1.0 GB/s")
    assert both[2] == f"{10 * 2**30 // per_token:,}"
    windows = config("qwen3-0.6b", use_sliding_window=True, sliding_window=64, max_window_layers=0)
    assert list(context_rows(windows, 1, 2, 3, 4.0)) == []


def test_a_model_that_hears() -> None:
    values = {
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": 51865,
        "d_model": 512,
        "decoder_layers": 6,
        "encoder_layers": 6,
        "decoder_attention_heads": 8,
        "encoder_attention_heads": 8,
        "decoder_ffn_dim": 2048,
        "encoder_ffn_dim": 2048,
    }
    spec = parse_model_config(values, source="config.json")
    facts = dict(model_facts(spec, "auto"))
    assert facts["gives"].startswith("transcripts of audio (POST /v1/audio/transcriptions")
    assert "6 with full attention and 6 with attention to what is encoded" in facts["layers"]
    # 12 layers keep 2 vectors of 512 numbers of 2 bytes for 1,536 places.
    assert facts["KV cache"] == "36.0 MiB a transcript in 16 bits, with what is encoded"
    # Of the 72.6 million of whisper-base those of maps and of the table of tokens.
    assert facts["weights"].startswith("269 MiB in float32")
    assert not [*context_rows(spec, 0, 2**30, 2**30, 1e9)]


def test_a_model_that_reads() -> None:
    """The sizes are those of flan-t5-small."""
    values = {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 1024,
        "num_layers": 8,
        "num_decoder_layers": 8,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    spec = parse_model_config(values, source="config.json")
    facts = dict(model_facts(spec, "auto"))
    assert facts["gives"] == "text made of a text (POST /v1/completions)"
    assert "8 with full attention and 8 with attention to what is encoded" in facts["layers"]
    assert facts["context"] == "512 tokens, or up to 4,096 by --max-model-len"
    # 16 layers keep 2 vectors of 384 numbers of 2 bytes for 512 places.
    assert facts["KV cache"] == "12.0 MiB an answer in 16 bits, with what is encoded"
    # Of the 77.0 million of flan-t5-small those of maps and of both tables of tokens.
    assert facts["weights"].startswith("294 MiB in float32")
    assert not [*context_rows(spec, 0, 2**30, 2**30, 1e9)]


def test_layers_without_attention_are_counted_apart() -> None:
    """The sizes are those of Llama 3.1 8B, in layers that DeciLM's blocks tell one by one."""
    given = {"n_heads_in_group": 4}
    attention = (given, {"no_op": True}, {"replace_with_linear": True}, given, {"no_op": True})
    blocks = [{"attention": own, "ffn": {"ffn_mult": 5.25}} for own in attention]
    own = {"architectures": ["DeciLMForCausalLM"], "block_configs": blocks}
    spec = config("llama-3.1-8b", num_hidden_layers=5, **own)
    facts = dict(model_facts(spec, "auto"))
    counts = "2 with full attention and 2 with no attention and 1 with a map in place of attention"
    assert counts in facts["layers"]
    # Two layers keep 2 vectors of 8 heads of 128 numbers of 2 bytes.
    assert facts["KV cache"].startswith("8.00 KiB a token in 16 bits")
