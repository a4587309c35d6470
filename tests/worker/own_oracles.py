# SPDX-License-Identifier: Apache-2.0
"""Models that transformers has no class for: others of its classes, with modules that compute as makers' do."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn


class Jais(transformers.BloomForCausalLM):
    """BLOOM with gated MLPs, scores over the size of heads, and no norm of embeddings."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer.word_embeddings_layernorm = nn.Identity()
        for block in self.transformer.h:
            block.mlp = _GatedMlp(config.hidden_size, 96)
            block.self_attention.inv_norm_factor = 1 / block.self_attention.head_dim


class _GatedMlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.c_fc, self.c_fc2 = nn.Linear(hidden, inner), nn.Linear(hidden, inner)
        self.c_proj = nn.Linear(inner, hidden)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.c_proj(self.c_fc(x) * torch.nn.functional.silu(self.c_fc2(x)))
