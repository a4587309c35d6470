# SPDX-License-Identifier: Apache-2.0
"""Factors of a model; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Multipliers:
    """Factors of what passes between layers."""

    embedding: float = 1.0
    """Factor of embeddings, rounded to the dtype of the weights."""
    residual: float = 1.0
    """Factor of what attention and MLP add to hidden states."""
    logits: float = 1.0
    logits_softcap: float | None = None
    """Logits x, times their factor, become c tanh(x / c)."""

    @property
    def keep_order(self) -> bool:
        """True if different logits surely stay different, so that the likeliest token is known without factors."""
        return self.logits_softcap is None and math.frexp(self.logits)[0] == 0.5
