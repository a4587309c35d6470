# SPDX-License-Identifier: Apache-2.0
"""Adapters that fit a model, and the sentence about each that does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import save_adapter_of
from safetensors.torch import load_file, save_file

from pagoda.checkpoints.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.presets import PRESETS
from pagoda.errors import ConfigError

_SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
CONFIG = parse_model_config({**PRESETS["llama-3.2-1b"], **_SMALL}, source="small")
WITH_EXPERTS = parse_model_config(
    {**PRESETS["mixtral-8x7b"], **_SMALL, "head_dim": 64, "num_attention_heads": 32}, source="small"
)
LATENT = parse_model_config(
    {
        **_SMALL,
        "architectures": ["DeepseekV3ForCausalLM"],
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "first_k_dense_replace": 2,
    },
    source="small",
)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _change_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / WEIGHTS_FILE
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def _rename(old: str, new: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return _change_tensors(change)


def _remove(*names: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    return _change_tensors(change)


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return apply


def test_an_adapter_that_fits(tmp_path: Path) -> None:
    directory = save_adapter_of(CONFIG, tmp_path / "a", rank=4, lora_alpha=6, use_rslora=True)
    files = read_adapter(directory, CONFIG, max_rank=4)
    assert (len(files.linears), files.rank, files.scale) == (14, 4, 3.0)
    assert files.linears["model.layers.1.mlp.down_proj"].down.endswith("down_proj.lora_A.weight")
    assert read_adapter(directory, CONFIG, max_rank=4).digest == files.digest
    other = save_adapter_of(CONFIG, tmp_path / "b", rank=4, lora_alpha=6, use_rslora=True, seed=1)
    assert read_adapter(other, CONFIG, max_rank=4).digest != files.digest


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"init_lora_weights": "gaussian", "lora_alpha": 16.5},
        {"layers_to_transform": [0, 1], "modules_to_save": []},
        {"bias": None, "revision": "main", "inference_mode": True},
    ],
)
def test_fields_that_change_nothing(fields: dict[str, Any], tmp_path: Path) -> None:
    assert read_adapter(save_adapter_of(CONFIG, tmp_path, **fields), CONFIG, max_rank=8).linears


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"peft_type": "IA3"}, 'peft_type must be "LORA"'),
        ({"bias": "all"}, "bias is not supported"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights changes the weights of the model"),
        ({"r": 0}, "r must be a positive integer"),
        ({"r": 4}, "has shape"),
        ({"lora_alpha": -1}, "lora_alpha must be a positive number"),
        ({"target_modules": ["q_proj", "c_attn"]}, "names no linear layer of the model: 'c_attn'"),
        ({"target_modules": ["lm_head"]}, "names the embedding or the head"),
        ({"target_modules": [7]}, "target_modules must be a list of strings"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    directory = save_adapter_of(CONFIG, tmp_path, **fields)
    with pytest.raises(ConfigError) as raised:
        read_adapter(directory, CONFIG, max_rank=8)
    assert sentence in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_write(CONFIG_FILE, b"{"), "is not valid JSON"),
        (_write(CONFIG_FILE, b"[]"), "must hold a JSON object"),
        (lambda directory: (directory / CONFIG_FILE).unlink(), "cannot be read"),
        (lambda directory: (directory / WEIGHTS_FILE).unlink(), "has no file"),
        (_write(WEIGHTS_FILE, b"\0" * 100), "is not a complete safetensors file"),
        (_write(WEIGHTS_FILE, b"\xff" * 100), "is not a complete safetensors file"),
        (_change_tensors(lambda t: t.clear()), "holds no tensors"),
        (_remove(f"{Q}.lora_B.weight"), f"lacks the tensor {Q}.lora_B.weight."),
        (
            _remove(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"),
            f"lacks the tensor {Q}.lora_A.weight, which target_modules",
        ),
        (
            _change_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 63)})),
            "the adapter is for another model",
        ),
        (
            _change_tensors(
                lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 64, dtype=torch.int8)})
            ),
            "is stored as I8",
        ),
        (
            _change_tensors(lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(8)})),
            "is none of a LoRA adapter's",
        ),
        (_rename("layers.1", "layers.7"), "which the model lacks"),
        (_rename("model.layers.0.mlp.up_proj", "lm_head"), "of the embedding and of the head"),
        (_rename("self_attn.q_proj", "mlp.experts.0.w1"), "adapters of experts"),
    ],
)
def test_files_that_are_refused(
    spoil: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    directory = save_adapter_of(CONFIG, tmp_path)
    spoil(directory)
    with pytest.raises(ConfigError) as raised:
        read_adapter(directory, CONFIG, max_rank=8)
    assert sentence in str(raised.value)


def test_a_truncated_file(tmp_path: Path) -> None:
    path = save_adapter_of(CONFIG, tmp_path) / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is not a complete safetensors file"):
        read_adapter(tmp_path, CONFIG, max_rank=8)


def test_ranks_have_a_bound(tmp_path: Path) -> None:
    directory = save_adapter_of(CONFIG, tmp_path, rank=9)
    with pytest.raises(ConfigError, match="is above the highest rank, 8; raise --max-lora-rank"):
        read_adapter(directory, CONFIG, max_rank=8)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no adapter directory"):
        read_adapter(tmp_path / "none", CONFIG, max_rank=8)


@pytest.mark.parametrize("module", ["q_a_proj", "q_b_proj", "kv_b_proj"])
def test_maps_of_latent_attention_that_are_refused(module: str, tmp_path: Path) -> None:
    """By the configuration, and by the tensors where the configuration names all layers."""
    fits = ("kv_a_proj_with_mqa", "o_proj")
    directory = save_adapter_of(LATENT, tmp_path, targets=fits, target_modules="all-linear")
    assert len(read_adapter(directory, LATENT, max_rank=8).linears) == 4
    name = f"model.layers.1.self_attn.{module}"
    _rename("model.layers.1.self_attn.o_proj", name)(directory)
    with pytest.raises(ConfigError, match=f"adapts {name}; adapters of maps whose rows take turns"):
        read_adapter(directory, LATENT, max_rank=8)
    config = json.loads((directory / CONFIG_FILE).read_text())
    (directory / CONFIG_FILE).write_text(json.dumps(config | {"target_modules": [module, *fits]}))
    with pytest.raises(ConfigError, match=f"cannot all be adapted; .* not supported: '{module}'"):
        read_adapter(directory, LATENT, max_rank=8)


def test_heads_that_are_filled_up_are_refused(tmp_path: Path) -> None:
    """Keys and values are of fewer heads in one layer; queries and outputs are as in others."""
    lists = {"architectures": ["DeciLMForCausalLM"], "num_key_value_heads_per_layer": [8, 4]}
    config = parse_model_config({**PRESETS["llama-3.2-1b"], **_SMALL, **lists}, source="small")
    fits = save_adapter_of(config, tmp_path / "a", targets=("q_proj", "o_proj"))
    assert len(read_adapter(fits, config, max_rank=8).linears) == 4
    all_of_them = save_adapter_of(config, tmp_path / "b")
    said = (
        r"adapts model\.layers\.1\.self_attn\.k_proj; .* whose heads are filled up .* not supported"
    )
    with pytest.raises(ConfigError, match=said):
        read_adapter(all_of_them, config, max_rank=8)


def test_models_with_experts(tmp_path: Path) -> None:
    attention = save_adapter_of(WITH_EXPERTS, tmp_path / "a", targets=("q_proj", "o_proj"))
    assert len(read_adapter(attention, WITH_EXPERTS, max_rank=8).linears) == 4
    config = json.loads((attention / CONFIG_FILE).read_text())
    (attention / CONFIG_FILE).write_text(json.dumps(config | {"target_modules": ["w1", "q_proj"]}))
    with pytest.raises(ConfigError, match="names experts"):
        read_adapter(attention, WITH_EXPERTS, max_rank=8)
