# SPDX-License-Identifier: Apache-2.0
"""Tiny models in files as their makers publish them, where transformers writes others."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def as_published(directory: Path) -> None:
    """Gives tensors of models that see the names and shapes of their makers' files, which transformers changes.

    It renames layers of Kimi K2.5, takes apart the experts of Qwen3.5, and turns those of Qwen3-VL."""
    path = directory / "model.safetensors"
    tensors, experts = {}, {}
    config = (directory / "config.json").read_text()
    for name, tensor in sorted(load_file(path).items()):
        layer, found, rest = name.partition(".experts.")
        expert, _, place = rest.partition(".")
        if found and "qwen3_vl_moe" in config:
            tensors[name] = tensor.transpose(1, 2).contiguous()
        elif found and "qwen3_5" in config:
            experts.setdefault(layer, {})[place, int(expert)] = tensor
        else:
            tensors[name.replace("model.blocks.", "model.layers.")] = tensor
    for layer, parts in experts.items():
        gate, up, down = (
            torch.stack([parts[f"{it}_proj.weight", expert] for expert in range(len(parts) // 3)])
            for it in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{layer}.experts.down_proj"] = down
    save_file(tensors, path, metadata={"format": "pt"})
