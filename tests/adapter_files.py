# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT writes them, of random numbers, and the models that they are merged into."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pagoda.checkpoints.model_spec import ModelSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: nn.Module, directory: Path, *, targets: Sequence[str] = ALL, **options: Any
) -> Path:
    """Adapts all linear layers of a transformers model whose names end with one of `targets`."""
    linears = {
        name: (layer.weight.shape, float(layer.weight.detach().float().std()))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.endswith(tuple(targets))
    }
    return _save(linears, directory, targets=targets, **options)


def save_adapter_of(
    config: ModelSpec, directory: Path, *, targets: Sequence[str] = ALL, **options: Any
) -> Path:
    """The same for the model of a config.json, whose weights are about `1 / sqrt(inputs)`."""
    linears = {
        linear.name: (torch.Size((linear.outputs, linear.inputs)), linear.inputs**-0.5)
        for layer in range(config.num_layers)
        for linear in (*config.attention_linears(layer), *config.mlp_linears(layer))
        if linear is not None and linear.name.endswith(tuple(targets))
    }
    return _save(linears, directory, targets=targets, **options)


def _save(
    linears: Mapping[str, tuple[torch.Size, float]],
    directory: Path,
    *,
    targets: Sequence[str],
    rank: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    size: float = 0.7,
    **fields: Any,
) -> Path:
    """`fields` are other values in adapter_config.json. What is added is about `size` times a weight."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, ((outputs, inputs), std) in linears.items():
        down = torch.randn((rank, inputs), generator=generator)
        up = torch.randn((outputs, rank), generator=generator) * size * std * rank**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.to(dtype)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.1,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": list(targets),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merged(model: nn.Module, directory: Path) -> Any:
    """A copy of a transformers model whose weights have an adapter's added, in float32."""
    config = json.loads((directory / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    tensors = load_file(directory / "adapter_model.safetensors")
    result = copy.deepcopy(model).float()
    layers = dict(result.named_modules())
    with torch.no_grad():
        for name, down in tensors.items():
            module, found, _ = name.partition(".lora_A.weight")
            if found:
                up = tensors[f"{module}.lora_B.weight"]
                layer = layers[module.removeprefix("base_model.model.")]
                layer.weight += scale * up.float() @ down.float()
    return result
