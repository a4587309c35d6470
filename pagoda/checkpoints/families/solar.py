# SPDX-License-Identifier: Apache-2.0
"""Solar Pro: Llama in which some layers take up a share of what others in front were given (Upstage 2024)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import LayerSpec
from pagoda.checkpoints.model_spec import ModelSpec

_KEPT, _MIXED = ("bskcn_1", "bskcn_2"), ("bskcn_3", "bskcn_4")
"""Lists of layers whose inputs are kept, and of those whose inputs are mixed with what was kept last."""
_SHARES = "bskcn_tv"


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("mlp_bias", False)
    shares = fields.amounts(_SHARES)
    if len(shares) != 2 or not shares[1] <= 1:  # the first one is for training
        fields.refuse(_SHARES, "must be a list of two numbers up to 1")
    kept = {name: set(fields.integers(name)) for name in (*_KEPT, *_MIXED)}
    mixed: dict[int, list[tuple[int, float]]] = {}
    for first, second in zip(_KEPT, _MIXED, strict=True):
        for layer in kept[second]:
            source = max((it for it in kept[first] if 0 <= it <= layer), default=None)
            if source is None or not layer < spec.num_layers:
                fields.refuse(second, f"must name layers behind one of {first}")
            mixed.setdefault(layer, []).append((source, shares[1]))

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mixed_with=tuple(mixed.get(index, ())))

    return spec.with_layers(change)


SOLAR = Family(
    "SolarForCausalLM",
    "Solar Pro 22B",
    _adapt,
    defaults={
        "bskcn_1": [12, 20, 32, 44],
        "bskcn_2": [20, 32],
        "bskcn_3": [16, 24, 36, 48],
        "bskcn_4": [28, 40],
        "bskcn_tv": [0.9, 0.8],
    },
)
