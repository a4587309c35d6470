# SPDX-License-Identifier: Apache-2.0
"""Models that are rounded by a text, when they are loaded and as files, beside models of nearest codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
from driver import Driver, load
from gguf_models import Kind, save_gguf
from tiny_models import make_model, save_model

from pagoda.checkpoints.config_json import read_model_config
from pagoda.errors import ConfigError
from pagoda.messages.jobs import QualityConfig, QuantizeConfig, QuantizeFormat
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.quantization import quantization_on_load
from pagoda.plugins.bench.quality_job import compare
from pagoda.plugins.quantize.job import quantize

CONTEXT = 48


def _tokens(count: int, seed: int) -> list[int]:
    """A text in which some tokens are far more frequent than others."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator).pow(3) * 320).long().tolist()


def _windows(count: int = 24, seed: int = 1) -> list[list[int]]:
    tokens = _tokens(count * CONTEXT, seed)
    return [tokens[start : start + CONTEXT] for start in range(0, len(tokens), CONTEXT)]


def _kl(reference: Path, model: Path, **options: Any) -> float:
    """Mean KL(reference || model) on another text."""
    config = QualityConfig(
        model=WorkerConfig(
            model=str(model), dtype="float32", backend="reference", num_threads=2, **options
        ),
        reference=WorkerConfig(model=str(reference), dtype="float32", backend="reference"),
        texts=[_tokens(8 * CONTEXT, 2)],
        context_len=CONTEXT,
    )
    return compare(config, lambda *_: None).overall.kl_mean


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "mixtral", "qwen3-moe"])
def test_int4_is_closer_by_a_text(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    plain = _kl(tmp_path, tmp_path, quantization="int4")
    calibrated = _kl(tmp_path, tmp_path, quantization="int4", calibration_windows=_windows())
    assert calibrated < 0.95 * plain


def test_a_model_with_states_is_closer_by_a_text(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "block_multiple_of": 128}
    family_models.make_model("lfm2", **sizes).save_pretrained(tmp_path)
    plain = _kl(tmp_path, tmp_path, quantization="int4")
    calibrated = _kl(tmp_path, tmp_path, quantization="int4", calibration_windows=_windows())
    assert calibrated < 0.95 * plain


def test_a_model_with_latent_attention_is_closer_by_a_text(tmp_path: Path) -> None:
    """Maps of hidden states and of latent vectors; those of each head stay as they are."""
    sizes = {"kv_lora_rank": 64, "q_lora_rank": 64, "moe_intermediate_size": 64}
    model = family_models.make_model("deepseek-v3", n_group=1, topk_group=1, **sizes)
    model.save_pretrained(tmp_path)
    plain = _kl(tmp_path, tmp_path, quantization="int4")
    calibrated = _kl(tmp_path, tmp_path, quantization="int4", calibration_windows=_windows())
    assert calibrated < 0.95 * plain


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization_group_size": 64}])
def test_other_formats_are_closer_by_a_text(options: dict[str, Any], tmp_path: Path) -> None:
    make_model("qwen3", intermediate_size=128).save_pretrained(tmp_path)
    options = {"quantization": "int4", **options}
    calibrated = _kl(tmp_path, tmp_path, **options, calibration_windows=_windows())
    assert calibrated < 0.9 * _kl(tmp_path, tmp_path, **options)


def test_a_dense_gguf_file_is_rounded_by_a_text_and_a_quantized_one_refused(tmp_path: Path) -> None:
    dense, packed = tmp_path / "dense.gguf", tmp_path / "packed.gguf"
    save_gguf(make_model("llama"), dense)
    save_gguf(make_model("llama"), packed, lambda _: Kind.Q8_0)
    windows = _windows()
    plain = _kl(dense, dense, quantization="int4")
    assert _kl(dense, dense, quantization="int4", calibration_windows=windows) < 0.95 * plain
    with pytest.raises(ConfigError, match=r"is quantized already .* leave out --quantization"):
        load(packed, quantization="int4", calibration_windows=windows)


@pytest.mark.parametrize("name", ["w4a16", "w8a16", "w8a8"])
def test_a_file_is_closer_by_a_text(name: QuantizeFormat, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    save_model("qwen3", dense)
    distances = []
    for windows in ([], _windows()):
        out, reports = tmp_path / f"out{len(windows)}", list[tuple[int, int]]()
        out.mkdir()
        config = QuantizeConfig(
            model=str(dense),
            directory=str(out),
            format=name,
            group_size=32,
            max_shard_bytes=2**30,
            backend="reference",
            num_threads=2,
            calibration_windows=windows,
        )
        quantize(config, lambda *counts: reports.append(counts))  # noqa: B023 - called at once
        assert reports == [(done, len(reports)) for done in range(1, len(reports) + 1)]
        distances.append(_kl(dense, out))
    assert distances[1] < 0.9 * distances[0]


@pytest.mark.parametrize("least", [1, 10**6])
def test_an_expert_is_rounded_by_its_own_tokens_or_by_those_of_its_layer(
    least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.model.calibration.LEAST_EXPERT_TOKENS", least)
    save_model("qwen3-moe", tmp_path)
    plain = _kl(tmp_path, tmp_path, quantization="int4")
    calibrated = _kl(tmp_path, tmp_path, quantization="int4", calibration_windows=_windows())
    assert calibrated < 0.95 * plain


def test_experts_that_no_token_reaches_are_rounded_too(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path)
    windows = [[7, 7, 7]]
    options: dict[str, Any] = {"quantization": "int4", "calibration_windows": windows}
    assert _kl(tmp_path, tmp_path, **options) < 2 * _kl(tmp_path, tmp_path, quantization="int4")


def test_the_same_text_gives_the_same_answers(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    answers = []
    for seed in (1, 1, 9):
        runner = load(
            tmp_path, dtype="float32", quantization="int4", calibration_windows=_windows(seed=seed)
        )
        driver = Driver(runner)
        driver.start(0, _tokens(20, 3))
        driver.run([0], 30)
        answers.append(driver.output(0))
    assert answers[0] == answers[1] != answers[2]


def test_weights_by_other_texts_have_other_names() -> None:
    names = {
        quantization.summary
        for windows in ([], [[1, 2]], [[1, 3]])
        if (quantization := quantization_on_load("int4", 32, windows))
    }
    assert len(names) == 3, "or engines and disks would share KV of different weights"


def test_routers_and_a_head_of_its_own_are_as_without_a_text(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path)
    shape = read_model_config(tmp_path)
    assert not shape.tie_word_embeddings
    hidden = torch.randn(5, shape.hidden_size, generator=torch.Generator().manual_seed(4))
    logits = [
        load(
            tmp_path, quantization="int8", backend="reference", calibration_windows=windows
        ).model.logits(hidden)
        for windows in ([], _windows(2))
    ]
    assert torch.equal(*logits)


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="tokens beyond the model's vocabulary of 320"):
        load(tmp_path, quantization="int8", calibration_windows=[[1, 320]])


def test_activations_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = make_model("qwen3")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.q_proj are not finite"):
        load(tmp_path, dtype="float32", quantization="int8", calibration_windows=_windows(2))
