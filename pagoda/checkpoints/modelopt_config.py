# SPDX-License-Identifier: Apache-2.0
"""Formats of NVIDIA's checkpoints (TensorRT Model Optimizer), read from config.json or hf_quant_config.json."""

from __future__ import annotations

import re

from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization, Scheme
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.fp8_config import MXFP8, Fp8Scheme
from pagoda.checkpoints.linears import LinearRole
from pagoda.checkpoints.weight_formats import NVFP4

_SCHEMES: dict[str, Scheme] = {
    "FP8": Fp8Scheme(None, None),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme(1, None),
    "FP8_PB_WO": Fp8Scheme(128, 128),
    "MXFP8": MXFP8,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
}
_MIXED, _DENSE = "MIXED_PRECISION", ("", "NONE", "UNQUANTIZED")


def modelopt(fields: Fields) -> CheckpointQuantization | None:
    """One scheme for all layers but those that are left out, or with `MIXED_PRECISION` one for each layer.

    None if K and V alone are rounded."""
    fields = fields.table("quantization") or fields
    left_out = "ignore" if fields.values.get("ignore") is not None else "exclude_modules"
    algorithm = fields.text("quant_algo", "").upper()
    targets: list[tuple[str, Scheme | None]]
    if algorithm == _MIXED:
        layers = fields.table("quantized_layers")
        if layers is None:
            fields.refuse("quantized_layers", f"must name the layers of {_MIXED}")
        # Experts are named by what holds them all.
        named = {name: layers.table(name) for name in layers.values}
        targets = [
            (target, _scheme(layer))
            for name, layer in named.items()
            if layer is not None
            for target in (name, f"{name}.")
        ]
    elif algorithm in _DENSE:
        return None
    else:
        targets = [("Linear", _scheme(fields))]
    return CheckpointQuantization(
        "modelopt",
        tuple(targets),
        tuple(it for name in fields.texts(left_out, []) for it in _patterns(name)),
        dense=frozenset({LinearRole.EMBEDDING, LinearRole.WHOLE, LinearRole.ROUTER}),
    )


def _scheme(fields: Fields) -> Scheme | None:
    name = fields.text("quant_algo", "").upper()
    if name in _DENSE:
        return None
    if name not in _SCHEMES:
        fields.refuse("quant_algo", f"must be one that Pagoda reads, {', '.join(_SCHEMES)}")
    scheme = _SCHEMES[name]
    if scheme is NVFP4 and fields.positive("group_size", 16) != 16:
        fields.refuse("group_size", "must be 16, the inputs of a group of NVFP4")
    return scheme


def _patterns(name: str) -> tuple[str, ...]:
    """A layer, or all whose names begin so, with stars for any text."""
    if "*" not in name:
        return name, f"{name}."
    return (rf"re:{re.escape(name).replace(re.escape('*'), '.*')}(\.|$)",)
