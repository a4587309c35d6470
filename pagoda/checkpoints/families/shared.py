"""Experts and sliding windows, as several families spell them."""

from __future__ import annotations

from pagoda.checkpoints.fields import Fields

MAX_EXPERTS = 1024
"""Experts of a layer that kernels have room for."""
_KINDS = ("full_attention", "sliding_attention")


def expert_counts(fields: Fields, name: str, defaults: tuple[int, int]) -> tuple[int, int]:
    """Experts of a layer (the field `name`), and experts that each token goes through."""
    num_experts = fields.positive(name, defaults[0])
    if num_experts > MAX_EXPERTS:
        fields.refuse(name, f"must be at most {MAX_EXPERTS}")
    per_token = fields.positive("num_experts_per_tok", defaults[1])
    if per_token > num_experts:
        fields.refuse("num_experts_per_tok", f"must be at most {name} ({num_experts})")
    return num_experts, per_token


def layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Window of each layer: by `layer_types`, or of the layers from `max_window_layers` on."""
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = fields.positive("sliding_window", 4096)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        num_full = fields.positive("max_window_layers", 28)
        return tuple(None if layer < num_full else window for layer in range(num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(k not in _KINDS for k in kinds)
    ):
        fields.refuse("layer_types", f"must be a list of {num_layers} of {', '.join(_KINDS)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
