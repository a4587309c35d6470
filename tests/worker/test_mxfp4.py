# SPDX-License-Identifier: Apache-2.0
"""Experts in 4-bit floats (MXFP4), as gpt-oss is published, answer as the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from driver import answer_differences, load, load_config
from family_models import make_model
from gguf import GGMLQuantizationType as Kind
from gguf_models import save_gguf
from safetensors.torch import load_file, save_file

from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.contents import missing_tensor, tensor_names
from pagoda.errors import ConfigError
from pagoda.messages.worker_config import WorkerConfig

_SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "initializer_range": 0.06,
}
_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def _packed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [..., in] as blocks [..., in / 32, 16] and exponents [..., in / 32], and what these stand for."""
    octets = torch.from_numpy(gguf.quantize(rows.numpy(), Kind.MXFP4))
    meant = torch.from_numpy(gguf.dequantize(octets.numpy(), Kind.MXFP4)).view(rows.shape)
    blocks = octets.view(*rows.shape[:-1], -1, 17)
    halves = blocks[..., 1:]
    codes = torch.cat((halves & 15, halves >> 4), dim=-1).unflatten(-1, (16, 2))
    return codes[..., 0] | codes[..., 1] << 4, blocks[..., 0].contiguous(), meant


def _save(directory: Path) -> Any:
    """Writes a gpt-oss as its makers do; returns the model with the numbers that its experts then have."""
    model = make_model("gpt-oss", **_SIZES)
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        rows = tensors.pop(name).transpose(1, 2).contiguous()
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], meant = _packed(rows)
        model.get_parameter(name).data.copy_(meant.transpose(1, 2))
    save_file(tensors, path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": _CONFIG}))
    return model


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_checkpoints_answer_as_their_numbers(backend: str, tmp_path: Path) -> None:
    model = _save(tmp_path)
    assert missing_tensor(read_model_config(tmp_path), tensor_names(tmp_path)) is None
    differences = answer_differences(load(tmp_path, backend=backend, dtype="float32"), model)
    assert differences.mean() < 0.02


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gguf_files_answer_as_their_numbers(backend: str, tmp_path: Path) -> None:
    model = _save(tmp_path)
    kinds = {True: Kind.MXFP4, False: Kind.F32}
    path = tmp_path / "m.gguf"
    save_gguf(model, path, lambda name: kinds["_exps.weight" in name])
    differences = answer_differences(load(path, backend=backend, dtype="float32"), model)
    assert differences.mean() < 0.02


def test_experts_take_four_bits(tmp_path: Path) -> None:
    _save(tmp_path)
    config = WorkerConfig(model=str(tmp_path), num_blocks=64, num_threads=1)
    assert "mxfp4 weights of experts" in load_config(config)[1].summary
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace("lm_head", "experts.3")
    )
    with pytest.raises(ConfigError, match=r"modules_to_not_convert must not name experts"):
        load(tmp_path)
