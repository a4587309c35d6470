# SPDX-License-Identifier: Apache-2.0
"""Formats of AMD's checkpoints (Quark), read from config.json."""

from __future__ import annotations

import fnmatch

from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization, Scheme
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.fp8_config import Fp8Scheme
from pagoda.checkpoints.linears import LinearRole
from pagoda.checkpoints.weight_formats import MXFP4, Int8Format

_SCHEMES: dict[tuple[str, str], Scheme] = {
    ("fp8_e4m3", "per_tensor"): Fp8Scheme(None, None),
    ("fp8_e4m3", "per_channel"): Fp8Scheme(1, None),
    ("int8", "per_tensor"): Int8Format(),
    ("int8", "per_channel"): Int8Format(),
    ("fp4", "per_group"): MXFP4,
}
"""Schemes by `dtype` and `qscheme` of weights."""


def quark(fields: Fields) -> CheckpointQuantization | None:
    """A scheme for all layers, with others for some (`layer_quant_config`); None if no weights are rounded."""
    targets: list[tuple[str, Scheme | None]] = []
    if fields.values.get("layer_type_quant_config"):
        fields.refuse("layer_type_quant_config", "must be absent or empty")
    own = fields.table("layer_quant_config") or Fields({}, fields.source)
    for name in own.values:
        scheme = _scheme(own.table(name))
        targets += [(target, scheme) for target in _targets(fields, "layer_quant_config", name)]
    targets.append(("Linear", _scheme(fields.table("global_quant_config"))))
    if all(scheme is None for _, scheme in targets):
        return None
    return CheckpointQuantization(
        "quark",
        tuple(targets),
        tuple(
            it for name in fields.texts("exclude", []) for it in _targets(fields, "exclude", name)
        ),
        dense=frozenset({LinearRole.EMBEDDING, LinearRole.WHOLE, LinearRole.ROUTER}),
    )


def _scheme(fields: Fields | None) -> Scheme | None:
    weights = None if fields is None or not fields.values.get("weight") else fields.table("weight")
    if weights is None:
        return None
    dtype = weights.text("dtype")
    kind = dtype, weights.text("qscheme", "per_group" if dtype == "fp4" else "per_tensor")
    if kind not in _SCHEMES:
        known = ", ".join(f"{dtype} {sharing}" for dtype, sharing in _SCHEMES)
        weights.refuse("dtype", f"must, with qscheme, be one that Pagoda reads, {known}")
    if not weights.flag("symmetric", True):
        weights.refuse("symmetric", "must be true")
    if kind[1] == "per_channel":
        weights.require("ch_axis", 0)
    scheme = _SCHEMES[kind]
    if scheme is MXFP4:
        weights.require("scale_format", "e8m0")
        weights.require("group_size", 32)
        if weights.values.get("ch_axis") not in (None, -1, 1):
            weights.refuse("ch_axis", "must be -1, the inputs")
    return scheme


def _targets(fields: Fields, key: str, name: str) -> tuple[str, ...]:
    """A layer, all whose names begin so, or a pattern, one of a shell's or behind `re:`."""
    if name.startswith("re:"):
        fields.pattern(key, name)
        return (name,)
    if not any(sign in name for sign in "*?["):
        return name, f"{name}."
    return tuple(f"re:{fnmatch.translate(it)}" for it in (name, f"{name}.*"))
