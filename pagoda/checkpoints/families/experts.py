"""Counts of experts, which families of mixture-of-experts models share."""

from __future__ import annotations

from pagoda.checkpoints.fields import Fields

MAX_EXPERTS = 1024
"""Experts of a layer that kernels have room for."""


def expert_counts(fields: Fields, name: str, defaults: tuple[int, int]) -> tuple[int, int]:
    """Experts of a layer (the field `name`), and experts that each token goes through.

    Raises:
        ConfigError: one of them is no positive number, or too large.
    """
    num_experts = fields.positive(name, defaults[0])
    if num_experts > MAX_EXPERTS:
        fields.refuse(name, f"must be at most {MAX_EXPERTS}")
    per_token = fields.positive("num_experts_per_tok", defaults[1])
    if per_token > num_experts:
        fields.refuse("num_experts_per_tok", f"must be at most {name} ({num_experts})")
    return num_experts, per_token
