# SPDX-License-Identifier: Apache-2.0
"""The model for benchmarks is one that others load: its tokenizer, its shape, its GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cpu.random_model import END_TOKEN, WEIGHTS_FILE, write_model
from pagoda.checkpoints.presets import PRESETS

CONFIG = {
    **PRESETS["qwen3-0.6b"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 400,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random-model")
    write_model(path, CONFIG, seed=0)
    return path


def test_transformers_loads_every_weight(directory: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.model_type == "qwen3"
    assert model.generation_config.eos_token_id == 399


def test_every_token_but_the_end_is_seen(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == 400
    assert tokenizer.eos_token_id == 399
    assert tokenizer.convert_ids_to_tokens(399) == END_TOKEN
    assert tokenizer.decode([300, 398]) == " 300 398"
    assert tokenizer.decode(tokenizer("a  b")["input_ids"]) == "a  b"


def test_the_same_seed_gives_the_same_weights(directory: Path, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIG, seed=0)
    ours, again = (load_file(path / WEIGHTS_FILE) for path in (directory, tmp_path))
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0"])
def test_gguf_holds_the_same_weights(directory: Path, tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    from benchmarks.cpu.random_gguf import write_gguf

    path = tmp_path / "model.gguf"
    write_gguf(directory, CONFIG, path, kind)  # type: ignore[arg-type]
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = load_file(directory / WEIGHTS_FILE)
    assert len(stored) == len(weights)
    tensor = stored["blk.1.ffn_down.weight"]
    assert tensor.tensor_type.name == kind.upper()
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    expected = weights["model.layers.1.mlp.down_proj.weight"].float()
    tolerance = {"bf16": 0.0, "q8_0": 0.01, "q4_0": 0.15}[kind]
    assert (values - expected).abs().max() <= tolerance * expected.abs().max()
