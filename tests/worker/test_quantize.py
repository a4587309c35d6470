# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints, read back; the reader is tested with files packed from the format's description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from driver import Driver, load
from family_models import make_model as make_other_model
from gguf_models import save_gguf
from own_code_models import as_makers_publish, make_like
from tiny_models import make_model, save_model

from pagoda.backend.weights import GroupedWeight, Int8Weight, dequantize
from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization
from pagoda.checkpoints.config_json import read_model_config
from pagoda.errors import ConfigError
from pagoda.messages.jobs import QuantizeConfig, QuantizeResult
from pagoda.model.compressed_tensors import quantized_linears
from pagoda.model.quantized_checkpoint import QuantizedCheckpoint
from pagoda.model.weights import open_checkpoint
from pagoda.plugins.quantize.job import quantize
from pagoda.worker.backends import choose_backend

FORMATS = ("w8a8", "w8a16", "w4a16")


def _quantize(source: Path, target: Path, **changes: Any) -> QuantizeResult:
    target.mkdir()
    config = QuantizeConfig(
        model=str(source),
        directory=str(target),
        format="w4a16",
        group_size=32,
        max_shard_bytes=2**30,
        num_threads=2,
    )
    return quantize(msgspec.structs.replace(config, **changes), lambda *_: None)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_a_quantized_model_is_the_model_rounded(
    family: str, format_name: str, tmp_path: Path
) -> None:
    save_model(family, tmp_path / "dense")
    dense, quantized = tmp_path / "dense", tmp_path / "quantized"
    _quantize(dense, quantized, format=format_name)
    shape = read_model_config(quantized)
    assert isinstance(shape.quantization, CheckpointQuantization)
    largest = {"w8a8": 0.01, "w8a16": 0.01, "w4a16": 0.12}[format_name]
    with open_checkpoint(dense) as before, open_checkpoint(quantized) as after:
        reader = QuantizedCheckpoint(after, shape.quantization)
        names = {f"{linear.name}.weight" for linear in quantized_linears(shape)}
        for linear in quantized_linears(shape):
            weight = reader.linear(linear, torch.float32)
            assert isinstance(weight, Int8Weight if format_name == "w8a8" else GroupedWeight)
            values = before.stored(f"{linear.name}.weight").float()
            assert (dequantize(weight) - values).std() < largest * values.std()
        for name in set(before.names()) - names:
            assert torch.equal(before.stored(name), after.stored(name)), "copied as it is"


def test_w8a8_holds_the_symmetric_codes_of_the_backend(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "dense")
    _quantize(tmp_path / "dense", tmp_path / "out", format="w8a8")
    shape = read_model_config(tmp_path / "out")
    assert isinstance(shape.quantization, CheckpointQuantization)
    backend, _ = choose_backend("reference")
    with open_checkpoint(tmp_path / "dense") as before, open_checkpoint(tmp_path / "out") as after:
        for linear in quantized_linears(shape):
            values = before.stored(f"{linear.name}.weight")
            read = QuantizedCheckpoint(after, shape.quantization).linear(linear, torch.float32)
            expected = backend.quantize_int8(values, symmetric=True)
            assert isinstance(read, Int8Weight)
            assert torch.equal(read.values, expected.values)
            assert torch.equal(read.scales, expected.scales)


@pytest.mark.parametrize("format_name", ["w8a8", "w8a16"])
def test_files_of_a_bounded_size_answer_like_one_file_and_the_model(
    format_name: str, tmp_path: Path
) -> None:
    save_model("qwen3", tmp_path / "dense", max_shard_size="100KB")
    one = _quantize(tmp_path / "dense", tmp_path / "one", format=format_name)
    several = _quantize(
        tmp_path / "dense", tmp_path / "several", format=format_name, max_shard_bytes=50_000
    )
    assert one.num_files == 1 < several.num_files
    assert one.weight_bytes == several.weight_bytes < one.source_bytes
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == several.weight_bytes
    assert len({*index["weight_map"].values()}) == several.num_files
    largest = max(path.stat().st_size for path in (tmp_path / "several").glob("*.safetensors"))
    assert largest < max(50_000, 320 * 64 * 4) + 10_000, "no file holds more but for one tensor"
    prompt = torch.randint(320, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    answers = []
    for name in ("dense", "one", "several"):
        driver = Driver(load(tmp_path / name, dtype="float32"))
        driver.start(0, prompt)
        driver.run([0], 6)
        answers.append(driver.output(0))
    assert answers[0] == answers[1] == answers[2]


def test_what_belongs_to_the_model_is_copied(tmp_path: Path) -> None:
    dense, out = tmp_path / "dense", tmp_path / "out"
    save_model("llama", dense, max_shard_size="100KB")
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "old.bin"):
        (dense / name).write_text(name)
    _quantize(dense, out)
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "chat_template.jinja", "LICENSE"),
    }
    before, after = (json.loads((it / "config.json").read_text()) for it in (dense, out))
    quantization = after.pop("quantization_config")
    assert before == after
    assert quantization["ignore"] == ["lm_head"]


def test_routers_of_experts_stay_dense(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path / "dense")
    _quantize(tmp_path / "dense", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    assert config["ignore"] == ["lm_head", *routers]


def test_progress_counts_tensors(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "dense")
    (tmp_path / "out").mkdir()
    reports: list[tuple[int, int]] = []
    config = QuantizeConfig(
        model=str(tmp_path / "dense"),
        directory=str(tmp_path / "out"),
        format="w8a8",
        group_size=32,
        max_shard_bytes=2**30,
    )
    quantize(config, lambda done, total: reports.append((done, total)))
    assert reports == [(done, len(reports)) for done in range(1, len(reports) + 1)]


def test_a_model_that_does_not_take_the_format_is_refused(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "dense")
    with pytest.raises(ConfigError, match="has 64 inputs, which groups of 128 do not divide; take"):
        _quantize(tmp_path / "dense", tmp_path / "out", group_size=128)
    save_gguf(make_model("llama"), tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="is a GGUF file; --format w4a16 takes a directory of"):
        _quantize(tmp_path / "model.gguf", tmp_path / "of-gguf")
    _quantize(tmp_path / "dense", tmp_path / "once", format="w8a8")
    with pytest.raises(ConfigError, match="is quantized already \\(compressed-tensors int8"):
        _quantize(tmp_path / "once", tmp_path / "twice")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = make_model("qwen3")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.inf
    model.save_pretrained(tmp_path / "dense")
    for name in FORMATS:
        with pytest.raises(ConfigError, match=r"up_proj\.weight holds numbers that are infinite"):
            _quantize(tmp_path / "dense", tmp_path / name, format=name)


def test_heads_that_are_filled_up_are_rounded_as_they_are_stored(tmp_path: Path) -> None:
    """By a text they are refused."""
    make_like("deci").save_pretrained(tmp_path / "dense")
    as_makers_publish("deci", tmp_path / "dense")
    _quantize(tmp_path / "dense", tmp_path / "out", format="w8a8")
    shape = read_model_config(tmp_path / "dense")
    keys = [f"{it.name}.weight" for it in quantized_linears(shape) if it.name.endswith("k_proj")]
    with open_checkpoint(tmp_path / "out") as after:
        assert {after.shape(name) for name in keys} == {(rows, 64) for rows in (16, 32, 64)}
    prompt, answers = list(range(40)), []
    for name in ("dense", "out"):
        driver = Driver(load(tmp_path / name, dtype="float32"))
        driver.start(0, prompt)
        driver.run([0], 8)
        answers.append(driver.output(0))
    assert answers[0] == answers[1]
    with pytest.raises(
        ConfigError, match=r"heads that are filled up \(model\.layers\.0\.self_attn\.k_proj"
    ):
        _quantize(
            tmp_path / "dense", tmp_path / "text", format="w8a8", calibration_windows=[prompt]
        )


def test_layers_in_one_tensor_are_refused(tmp_path: Path) -> None:
    make_other_model("phi3").save_pretrained(tmp_path / "dense")
    with pytest.raises(
        ConfigError, match=r"in one tensor \(model\.layers\.0\.self_attn\.qkv_proj\)"
    ):
        _quantize(tmp_path / "dense", tmp_path / "out", format="w8a16")
