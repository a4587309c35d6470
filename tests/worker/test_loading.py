# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from driver import Driver, load_config
from family_models import make_model
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, save_model

from pagoda.backend.base import UNNAMED, Compiled
from pagoda.backend.graph import Graph
from pagoda.backend.operation import WeightNames
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.checkpoints.config_json import read_model_config
from pagoda.devices import DeviceSet
from pagoda.errors import ConfigError
from pagoda.messages.kv_groups import full_group
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.sharding import whole
from pagoda.parallel.config import ParallelConfig
from pagoda.worker.loading import plan_worker
from pagoda.worker.memory import choose_num_blocks, left_for_kv_cache, sampling_bytes

CONFIG = WorkerConfig(model="", max_num_seqs=4)
SIZES: dict[str, Any] = {
    "groups": [full_group(1, 16)],
    "bytes_per_block": 1024,
    "max_model_len": 100,
    "available_bytes": 100 * 1024,
}


def _replace(**changes: Any) -> WorkerConfig:
    return msgspec.structs.replace(CONFIG, **changes)


def test_the_cache_takes_its_share_of_free_memory() -> None:
    assert choose_num_blocks(_replace(memory_utilization=0.1), **SIZES) == 10
    assert choose_num_blocks(_replace(memory_utilization=0.9), **SIZES) == 4 * 7  # never more
    assert choose_num_blocks(_replace(kv_cache_memory_bytes=9 * 1024 + 5), **SIZES) == 9
    assert choose_num_blocks(_replace(kv_cache_memory_bytes=90 * 1024), **SIZES) == 90  # as asked
    assert choose_num_blocks(_replace(num_blocks=7), **SIZES) == 7
    assert choose_num_blocks(_replace(num_blocks=100), **SIZES) == 100


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_blocks": 6}, "--num-kv-blocks"),
        ({"kv_cache_memory_bytes": 6 * 1024}, "--kv-cache-memory-bytes"),
        ({"memory_utilization": 0.06}, "--kv-cache-memory-bytes"),
    ],
)
def test_too_small_a_cache_names_numbers_and_flags(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(_replace(**changes), **SIZES)
    assert str(caught.value) == (
        "the KV cache would hold 96 tokens (6.00 KiB of 100 KiB free memory), but one sequence may have 100 "
        f"(7.00 KiB); raise {flag} or lower --max-model-len."
    )


def test_tiers_below_the_cache_hold_the_rest_of_a_sequence() -> None:
    sizes = {**SIZES, "max_model_len": 1000, "segment_tokens": 64}
    small = _replace(num_blocks=10)
    assert choose_num_blocks(small, **sizes, num_cold_segments=15) == 10
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(small, **sizes, num_cold_segments=10)
    assert str(caught.value) == (
        "the KV cache would hold 160 tokens (10.0 KiB of 100 KiB free memory), and the tiers below it 640, but "
        "one sequence may have 1000 (63.0 KiB); raise --kv-host-bytes, --kv-disk-bytes or --num-kv-blocks or "
        "lower --max-model-len."
    )
    with pytest.raises(
        ConfigError, match="would hold 64 tokens"
    ):  # a segment, and nothing behind it
        choose_num_blocks(_replace(num_blocks=4), **sizes, num_cold_segments=100)


@pytest.mark.parametrize(
    ("changes", "flag", "size"),
    [
        ({"num_blocks": 9_000_000_000}, "--num-kv-blocks", "8583 GiB for 144000000000 tokens"),
        (
            {"kv_cache_memory_bytes": 10 * 2**40},  # more than requests could ever fill, too
            "--kv-cache-memory-bytes",
            "10240 GiB for 171798691840 tokens",
        ),
    ],
)
def test_too_large_a_cache_names_numbers_and_flags(
    changes: dict[str, Any], flag: str, size: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(_replace(**changes), **SIZES)
    assert str(caught.value) == (
        f"the KV cache would take {size}, but the weights leave only 100 KiB of memory free; lower {flag}."
    )


def test_weights_tokens_and_the_arena_must_fit_before_anything_is_loaded() -> None:
    def left(
        weight_bytes: int,
        batch_bytes: int,
        kv_host_bytes: int = 0,
        sampling_bytes: int = 0,
        step_bytes: int = 0,
    ) -> int:
        return left_for_kv_cache(
            _replace(model="big", kv_host_bytes=kv_host_bytes),
            weight_bytes=weight_bytes,
            batch_bytes=batch_bytes,
            sampling_bytes=sampling_bytes,
            step_bytes=step_bytes,
            step_tokens=64,
            max_model_len=100,
            available_bytes=1024,
        )

    assert (left(1000, 4), left(1000, 4, 20), left(1000, 4, 10, 5, 4)) == (20, 0, 1)
    for too_much, message in (
        ((2048, 4), "big take 2.00 KiB, but only 1.00 KiB of memory"),
        ((1000, 25), "4 requests of 100 take 25 B .*--max-num-"),
        ((1000, 4, 0, 21), "4 requests takes 21 B besides 1004 B .*; lower --max-num-seqs"),
        ((1000, 4, 0, 15, 6), "^steps of 64 tokens take 6 B besides 1019 B .*; lower --max-num-b"),
        ((1000, 4, 21), "^--kv-host-bytes gives this worker 21 B, .* leave only 20 B of"),
    ):
        with pytest.raises(ConfigError, match=message):
            left(*too_much)


def test_logits_of_all_requests_are_reckoned_with() -> None:
    """Those of Qwen3's vocabulary: copies of changed ones, shares that ranks gather, and each thread's sorting."""
    vocab = 151_936
    assert sampling_bytes(16, vocab, 1, 2) == vocab * (16 * 4 * 2 + 2 * 16)
    assert sampling_bytes(16, vocab, 2, 1) == vocab * (16 * 4 * 4 + 16)


def test_the_arena_holds_a_block_at_least(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    block = 2 * 2 * 2 * 32 * 16 * 4  # K and V, layers, heads, head size, tokens, bytes
    _load(tmp_path, max_model_len=64, kv_host_bytes=block)
    with pytest.raises(ConfigError, match=r"^--kv-host-bytes .* one block of 16.0 KiB; raise"):
        _load(tmp_path, max_model_len=64, kv_host_bytes=block - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_without_loading_them(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert whole(read_model_config(tmp_path)).weight_bytes(None, 4) == 4 * expected


def test_vectors_are_counted_in_float32_and_with_biases_of_experts(tmp_path: Path) -> None:
    model = make_model("gpt-oss")
    model.save_pretrained(tmp_path)
    parameters = [*model.named_parameters()]
    vectors = sum(each.numel() for name, each in parameters if each.ndim == 1 or "bias" in name)
    everything = sum(each.numel() for _, each in parameters)
    held = whole(read_model_config(tmp_path))
    assert held.weight_bytes(None, 4) == 4 * everything
    assert held.weight_bytes(None, 2) == 2 * (everything - vectors) + 4 * vectors


def test_a_model_larger_than_memory_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen3", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    monkeypatch.setattr("pagoda.backend.host.available_memory_bytes", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"take .* KiB, but only 97.7 KiB of memory"):
        _load(tmp_path)


def _load(directory: Path, **changes: Any) -> None:
    load_config(
        WorkerConfig(**{"model": str(directory), "num_threads": 1, "num_blocks": 64} | changes)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "--dtype must be one of auto, float32, bfloat16, float16, got 'int8'."),
        (
            {"kv_cache_dtype": "int4"},
            "--kv-cache-dtype must be one of auto, float32, bfloat16, float16, int8, fp8 on this backend, "
            "got 'int4'.",
        ),
        (
            {"backend": "reference", "batch_invariant": False},
            "--no-batch-invariant has no effect on reference on cpu, whose products are no quicker for it; "
            "leave it out.",
        ),
        ({"load_format": "gguf"}, "--load-format must be auto or dummy, got 'gguf'."),
        ({"max_num_seqs": 10**9}, "--max-num-seqs must be from 1 to 4096, got 1000000000."),
        (
            {"block_size": 24},
            "--block-size must be one of 1, 2, 4, 8, 16, 32, 64, 128, 256 ... 4096, got 24.",
        ),
        ({"max_model_len": 513}, "--max-model-len must be from 1 to the model's own 512, got 513."),
        ({"max_model_len": 0}, "--max-model-len must be from 1 to the model's own 512, got 0."),
    ],
)
def test_wrong_flags_are_one_sentence(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model("qwen3", tmp_path)
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, **changes)
    assert str(caught.value) == message


def test_a_missing_directory_names_the_presets_for_dummy_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model directory .* or a preset \(qwen3-0.6b, "):
        _load(tmp_path / "nothing", load_format="dummy")


def test_dummy_weights_of_a_directory_with_a_config_only(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    answers = []
    for seed in (1, 1, 2):
        config = WorkerConfig(
            model=str(tmp_path), load_format="dummy", seed=seed, num_blocks=64, num_threads=1
        )
        runner, ready = load_config(config)
        assert ready.vocab_size == 320
        driver = Driver(runner, num_blocks=64)
        driver.start(0, [1, 2, 3])
        driver.run([0], 20)
        answers.append(driver.output(0))
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_the_checkpoint_says_the_dtype(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = WorkerConfig(model=str(tmp_path), num_blocks=64, num_threads=1)
    assert "bfloat16" in load_config(config)[1].summary
    written = json.loads((tmp_path / "config.json").read_text())
    written["torch_dtype"] = written.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert "bfloat16" in load_config(config)[1].summary
    wider = msgspec.structs.replace(config, dtype="float32")
    assert "float32" in load_config(wider)[1].summary


def test_blocks_have_as_many_tokens_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    """Engines of different numbers of ranks hand blocks over; beyond KV heads only states are cut."""
    make_model("lfm2", num_attention_heads=16, conv_L_cache=9).save_pretrained(tmp_path)
    sizes = set()
    for ranks in (1, 2, 4):
        parallel = ParallelConfig(tensor_parallel_size=ranks)
        config = WorkerConfig(
            model=str(tmp_path), dtype="bfloat16", num_blocks=64, max_model_len=64
        )
        plan = plan_worker(msgspec.structs.replace(config, parallel=parallel))
        sizes.add(plan.block_size)
    assert len(sizes) == 1


def test_the_block_size_that_an_error_names_is_accepted(tmp_path: Path) -> None:
    """A state needs larger blocks than the smallest, of which only some sizes are there."""
    make_model("lfm2", conv_L_cache=12, num_attention_heads=16).save_pretrained(tmp_path)
    config = WorkerConfig(model=str(tmp_path), dtype="bfloat16", num_blocks=64, max_model_len=64)

    def block_size(wanted: int) -> int:
        return plan_worker(msgspec.structs.replace(config, block_size=wanted)).block_size

    with pytest.raises(ConfigError, match=r"--block-size must be at least (\d+) for ") as caught:
        block_size(1)
    said = re.search(r"at least (\d+) ", str(caught.value))
    assert said is not None
    least = int(said[1])
    assert block_size(least) == least > 1
    with pytest.raises(
        ConfigError, match=rf"--block-size must be one of {least}, .*, got {least - 1}"
    ):
        block_size(least - 1)


@pytest.mark.parametrize(
    "name",
    [
        *("self_attn.q_norm.weight", "input_layernorm.bias", "mlp.experts.0.up_proj.weight"),
        *("self_attn.q_proj.qweight_2", "mlp.gate.e_score_correction_bias"),
    ],
)
def test_tensors_of_layers_that_nothing_is_computed_with(name: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    path, name = tmp_path / "model.safetensors", f"model.layers.1.{name}"
    tensors = load_file(path)
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.post_attention_layernorm.bias": torch.zeros(64),
        "model.layers.2.mlp.experts.0.up_proj.weight": torch.ones(4, 4),
        "vision_tower.layers.0.weight": torch.ones(4),
    }
    layers = len(read_model_config(tmp_path).layers)
    harmless = {key.replace(".2.", f".{layers}."): value for key, value in harmless.items()}
    save_file(tensors | harmless, path, metadata={"format": "pt"})
    _load(tmp_path)
    save_file(tensors | {name: torch.ones(64)}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path)
    assert str(caught.value) == (
        f"{path}: tensor {name} has no place in the LlamaForCausalLM that config.json calls for."
    )


def test_the_backend_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("qwen3", tmp_path)
    opened: list[DeviceSet] = []

    def open_backend(devices: DeviceSet) -> ReferenceBackend:
        opened.append(devices)
        return ReferenceBackend()

    monkeypatch.setattr("pagoda.backend.reference.backend.open_backend", open_backend)
    _load(tmp_path, backend="reference")
    assert opened == [DeviceSet("cpu", (0,))]


def test_graphs_and_kv_tell_that_bits_may_depend_on_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Graph] = []

    class Varying(ReferenceBackend):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = msgspec.structs.replace(self.capabilities, varies_with_batch=True)

        def compile(self, graph: Graph, names: WeightNames = UNNAMED) -> Compiled[Any]:
            graphs.append(graph)
            return super().compile(graph, names)

    monkeypatch.setattr("pagoda.backend.reference.backend.ReferenceBackend", Varying)
    save_model("qwen3", tmp_path)
    options = {"model": str(tmp_path), "backend": "reference", "num_threads": 1, "num_blocks": 64}
    for invariant, name in ((True, ""), (False, ", not batch-invariant")):
        graphs.clear()
        _, ready = load_config(WorkerConfig(**options, batch_invariant=invariant))
        assert ready.arithmetic == f"reference on cpu{name}"
        assert {graph.batch_invariant for graph in graphs} == {invariant}
