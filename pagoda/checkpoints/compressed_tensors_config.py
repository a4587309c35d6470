# SPDX-License-Identifier: Apache-2.0
"""Formats of compressed-tensors checkpoints, read from config.json."""

from __future__ import annotations

from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization, GroupScheme, Scheme
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.fp8_config import compressed_tensors_scheme
from pagoda.checkpoints.weight_formats import MXFP4, NVFP4, Int8Format
from pagoda.errors import ConfigError

_FOUR_BIT_FLOATS = {
    "nvfp4-pack-quantized": ("tensor_group", 16, NVFP4),
    "mxfp4-pack-quantized": ("group", 32, MXFP4),
}
"""Layouts of 4-bit floats: how weights share scales, and how many inputs do."""


def compressed_tensors(fields: Fields) -> CheckpointQuantization | None:
    """Schemes of groups; None if K and V, or activations, alone are rounded."""
    _refuse_transforms(fields)
    groups = fields.table("config_groups") or Fields({}, fields.source)
    if not groups.values and fields.values.get("kv_cache_scheme") is None:
        fields.refuse("config_groups", "must name at least one group of weights")
    targets: list[tuple[str, Scheme | None]] = []
    for group_name in groups.values:
        group = groups.table(group_name)
        if group is None:
            groups.refuse(group_name, "must be a JSON object")
        if group.values.get("weights") is not None:
            scheme = _group_scheme(group, group.text("format", fields.text("format", "")))
            targets += [(target, scheme) for target in _patterns(group, "targets")]
    if not targets:
        return None
    return CheckpointQuantization("compressed-tensors", tuple(targets), _patterns(fields, "ignore"))


def _refuse_transforms(fields: Fields) -> None:
    """Raises ConfigError for anything that changes weights beyond quantizing them."""
    if fields.values.get("transform_config"):
        fields.refuse("transform_config", "must be empty")
    sparsity = fields.table("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        sparsity.refuse("format", "must be 'dense'")


def _patterns(fields: Fields, name: str) -> tuple[str, ...]:
    patterns = tuple(fields.texts(name, []))
    for pattern in patterns:
        if pattern.startswith("re:"):
            fields.pattern(name, pattern)
    return patterns


def _group_scheme(group: Fields, layout: str) -> Scheme:
    weights = group.table("weights")
    if weights is None:
        group.refuse("weights", "must say how weights are quantized")
    kind = weights.text("type", "int")
    if kind == "float":
        if weights.values.get("num_bits") == 4:
            return _four_bit_floats(weights, layout)
        return compressed_tensors_scheme(weights, layout)
    if kind != "int":
        weights.refuse("type", "must be 'int' or 'float'")
    inputs = group.table("input_activations")
    if inputs is not None and inputs.values.get("num_bits") not in (None, 8):
        inputs.refuse("num_bits", "must be 8")
    if layout in ("int-quantized", "naive-quantized"):
        return _integer_scheme(weights, inputs)
    if layout == "pack-quantized":
        return _packed_scheme(weights)
    raise ConfigError(
        f"{group.source}: quantization_config.format must be 'int-quantized' or 'pack-quantized', "
        f"got {layout!r}."
    )


def _four_bit_floats(weights: Fields, layout: str) -> Scheme:
    if layout not in _FOUR_BIT_FLOATS:
        known = " or ".join(map(repr, _FOUR_BIT_FLOATS))
        raise ConfigError(
            f"{weights.source}: quantization_config.format must be {known} for weights of type float and 4 bits, "
            f"got {layout!r}."
        )
    strategy, size, scheme = _FOUR_BIT_FLOATS[layout]
    if weights.text("strategy", strategy) != strategy:
        weights.refuse("strategy", f"must be {strategy!r} in the format {layout}")
    if weights.positive("group_size", size) != size:
        weights.refuse("group_size", f"must be {size} in the format {layout}")
    return scheme


def _integer_scheme(weights: Fields, inputs: Fields | None) -> Scheme:
    """Integers in bytes of their own. Scales of inputs are worked out anew for each token, also where files have
    some: these would only make more of the inputs too large."""
    strategy = weights.text("strategy", "")
    if weights.values.get("num_bits") == 4 or strategy == "group":
        return _packed_scheme(weights)
    if weights.values.get("num_bits") != 8:
        weights.refuse("num_bits", "must be 4 or 8 in the format int-quantized")
    if strategy not in ("channel", "tensor"):
        weights.refuse(
            "strategy", "must be 'channel', 'tensor' or 'group' in the format int-quantized"
        )
    if inputs is None:
        raise ConfigError(
            f"{weights.source}: quantization_config has the format int-quantized without input_activations; "
            "weights alone are quantized in the format pack-quantized."
        )
    return Int8Format(zero_points=not weights.flag("symmetric", True))


def _packed_scheme(weights: Fields) -> GroupScheme:
    strategy = weights.text("strategy", "")
    if strategy not in ("group", "channel"):
        weights.refuse("strategy", "must be 'group' or 'channel' in the format pack-quantized")
    return GroupScheme(
        bits=_bits(weights),
        group_size=weights.positive("group_size") if strategy == "group" else None,
        symmetric=weights.flag("symmetric", True),
        act_order=weights.values.get("actorder") in ("group", "dynamic", True),
    )


def _bits(weights: Fields) -> int:
    bits = weights.positive("num_bits")
    if bits not in (4, 8):
        weights.refuse("num_bits", "must be 4 or 8")
    return bits
