"""Sliding windows of single layers, as Qwen2 and Qwen3 choose them."""

from __future__ import annotations

from pagoda.checkpoints.fields import Fields

_KINDS = ("full_attention", "sliding_attention")


def layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Window of each layer: by `layer_types`, or of the layers from `max_window_layers` on.

    Raises:
        ConfigError: a field is wrong.
    """
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
