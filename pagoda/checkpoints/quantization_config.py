# SPDX-License-Identifier: Apache-2.0
"""Formats of ready-made quantized checkpoints, read from config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.fp8_config import Fp8Scheme, compressed_tensors_scheme, fp8_scheme
from pagoda.checkpoints.linears import NEVER_ROUNDED, LinearRole, LinearSpec
from pagoda.checkpoints.tensor_names import TEXT_PARTS
from pagoda.checkpoints.weight_formats import (
    MXFP4,
    BlockFormat,
    DenseFormat,
    Fp8Format,
    GroupedFormat,
    Int8Format,
    Quantization,
    WeightFormat,
    held_group_size,
)
from pagoda.errors import ConfigError

_SUPPORTED = (
    "compressed-tensors (fp8, int8 weights and inputs, or packed int4 and int8 weights), fp8, awq (4 bits), "
    "gptq (4 and 8 bits) and mxfp4"
)


@dataclass(frozen=True)
class GroupScheme:
    """Integers with a scale, and perhaps a zero point, for each group of inputs."""

    bits: int
    group_size: int | None
    """None: all inputs are one group."""
    symmetric: bool
    act_order: bool


Scheme = Int8Format | GroupScheme | Fp8Scheme | BlockFormat
"""Int8: a scale for each output, and one for each row of inputs, worked out anew."""
_DENSE_IN_FP8 = NEVER_ROUNDED | {LinearRole.EMBEDDING, LinearRole.HEAD}
Layout = Literal["compressed-tensors", "fp8", "awq", "gptq", "gptq_v2", "mxfp4"]
"""`awq` is AutoAWQ's `gemm`. `gptq` stores zero points less one, `gptq_v2` as they are."""


@dataclass(frozen=True)
class CheckpointQuantization:
    """Linear layers of a checkpoint that are quantized, and how."""

    layout: Layout
    targets: tuple[tuple[str, Scheme], ...]
    """Schemes by layer: a name, `re:` and a pattern that names begin with, or `Linear` for all others."""
    ignore: tuple[str, ...] = ()
    """Names and patterns of layers that stay dense."""
    dense: frozenset[LinearRole] = frozenset({LinearRole.EMBEDDING, LinearRole.WHOLE})
    keeps_fp8: bool = False
    """True if 8-bit floats stay what they are in memory; else they become dense as they are loaded."""

    @property
    def summary(self) -> str:
        kinds = " and ".join(dict.fromkeys(self._summary(scheme) for _, scheme in self.targets))
        return kinds if self.layout == "fp8" else f"{self.layout.removesuffix('_v2')} {kinds}"

    def scheme_of(self, linear: LinearSpec) -> Scheme | None:
        """Scheme of a layer; None if it is dense."""
        stored = linear.stored.tensor
        if linear.role in self.dense or any(_matches(name, stored) for name in self.ignore):
            return None
        for wanted in (stored, "Linear"):
            for target, scheme in self.targets:
                if _matches(target, wanted):
                    return scheme
        return None

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        scheme = self.scheme_of(linear)
        if scheme is None or linear.role is LinearRole.LATENT_HEADS:
            return DenseFormat()
        if isinstance(scheme, Fp8Scheme):
            # Tables, heads and routers are left out of fp8 checkpoints, as a rule, whatever config.json says.
            is_kept = self.keeps_fp8 and linear.role not in _DENSE_IN_FP8
            return scheme.stored_format if is_kept else DenseFormat()
        if isinstance(scheme, Int8Format | BlockFormat):
            return scheme
        return GroupedFormat(
            bits=scheme.bits,
            group_size=held_group_size(linear.name, linear.inputs, scheme.group_size),
            offsets=not scheme.symmetric,
            act_order=scheme.act_order,
        )

    @property
    def is_held_in_fp8(self) -> bool:
        """True if all layers that are quantized are 8-bit floats in memory."""
        return all(self._keeps(scheme) for _, scheme in self.targets)

    def _keeps(self, scheme: Scheme) -> bool:
        is_fp8 = isinstance(scheme, Fp8Scheme) and isinstance(scheme.stored_format, Fp8Format)
        return self.keeps_fp8 and is_fp8

    def _summary(self, scheme: Scheme) -> str:
        if not isinstance(scheme, Fp8Scheme):
            return _summary(scheme)
        return scheme.summary if self._keeps(scheme) else f"{scheme.summary}, converted"


def is_dense_once_loaded(quantization: Quantization | None) -> bool:
    """Returns True if all layers of a checkpoint are dense once they are loaded, and may be quantized anew."""
    return quantization is None or (
        isinstance(quantization, CheckpointQuantization)
        and not quantization.keeps_fp8
        and all(isinstance(scheme, Fp8Scheme) for _, scheme in quantization.targets)
    )


def _summary(scheme: Int8Format | GroupScheme | BlockFormat) -> str:
    if isinstance(scheme, Int8Format):
        return "int8 weights"
    if isinstance(scheme, BlockFormat):
        return "weights of experts"
    size = scheme.group_size
    return f"int{scheme.bits} weights ({'one group' if size is None else f'groups of {size}'})"


def _matches(target: str, name: str) -> bool:
    """Tells if a target names a layer, also as part of a model that sees or hears."""
    inner = name.removeprefix("model.")
    names = {name}
    for part in TEXT_PARTS:
        names |= {f"{part}{name}", f"model.{part}{inner}"}
    if target.startswith("re:"):
        return any(re.match(target[3:], known) for known in names)
    return target in names


def parse_quantization(config: Fields) -> CheckpointQuantization | None:
    """`quantization_config` of a config.json; None where there is none."""
    fields = config.table("quantization_config")
    default = ""
    if fields is None:
        fields, default = config.table("compression_config"), "compressed-tensors"
    if fields is None:
        return None
    method = fields.text("quant_method", default)
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    if method == "fp8":
        # Files say by the types of their tensors which are fp8; lists of names are written in several languages.
        scheme = fp8_scheme(fields)
        return CheckpointQuantization("fp8", (("Linear", scheme),), dense=frozenset())
    if method == "mxfp4":
        return _mxfp4(fields)
    if method == "awq":
        return _awq(fields)
    if method != "gptq":
        fields.refuse("quant_method", f"must be one that Pagoda reads, {_SUPPORTED}")
    return _gptq(fields)


def _mxfp4(fields: Fields) -> CheckpointQuantization:
    """4-bit floats of experts, as gpt-oss has them."""
    name = "modules_to_not_convert"
    if any("experts" in module for module in fields.texts(name, [])):
        fields.refuse(name, "must not name experts, the layers that mxfp4 is for")
    dense = frozenset(LinearRole) - {LinearRole.EXPERT_IN, LinearRole.EXPERT_OUT}
    return CheckpointQuantization("mxfp4", (("Linear", MXFP4),), dense=dense)


# ---- compressed-tensors


def _compressed_tensors(fields: Fields) -> CheckpointQuantization:
    _refuse_transforms(fields)
    groups = fields.table("config_groups")
    if groups is None or not groups.values:
        fields.refuse("config_groups", "must name at least one group of weights")
    targets: list[tuple[str, Scheme]] = []
    for group_name in groups.values:
        group = groups.table(group_name)
        if group is None:
            groups.refuse(group_name, "must be a JSON object")
        scheme = _group_scheme(group, group.text("format", fields.text("format", "")))
        targets += [(target, scheme) for target in _patterns(group, "targets")]
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
        try:
            re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError):
            if pattern.startswith("re:"):
                fields.refuse(name, f"must hold valid regular expressions, not {pattern!r}")
    return patterns


def _group_scheme(group: Fields, layout: str) -> Scheme:
    weights = group.table("weights")
    if weights is None:
        group.refuse("weights", "must say how weights are quantized")
    kind = weights.text("type", "int")
    if kind == "float":
        return compressed_tensors_scheme(weights, layout)
    if kind != "int":
        weights.refuse("type", f"must be 'int' or 'float'; Pagoda reads {_SUPPORTED}")
    inputs = group.table("input_activations")
    if inputs is not None:
        _check_inputs(inputs)
    if layout == "int-quantized":
        return _int8_scheme(weights, inputs)
    if layout == "pack-quantized":
        return _packed_scheme(weights)
    raise ConfigError(
        f"{group.source}: quantization_config.format must be 'int-quantized' or 'pack-quantized', "
        f"got {layout!r}."
    )


def _check_inputs(inputs: Fields) -> None:
    """Raises ConfigError unless each token's inputs are quantized by themselves."""
    if inputs.values.get("dynamic") is not True:
        inputs.refuse("dynamic", "must be true: static scales of inputs are not supported")
    for name, wanted, rule in (
        ("type", "int", "must be 'int'"),
        ("num_bits", 8, "must be 8"),
        ("symmetric", True, "must be true: zero points of inputs are not supported"),
        ("strategy", "token", "must be 'token'"),
    ):
        if inputs.values.get(name) not in (None, wanted):
            inputs.refuse(name, rule)


def _int8_scheme(weights: Fields, inputs: Fields | None) -> Int8Format:
    if weights.values.get("num_bits") != 8:
        weights.refuse("num_bits", "must be 8 in the format int-quantized")
    if weights.values.get("strategy") != "channel":
        weights.refuse("strategy", "must be 'channel' in the format int-quantized")
    if not weights.flag("symmetric", True):
        weights.refuse("symmetric", "must be true in the format int-quantized")
    if inputs is None:
        raise ConfigError(
            f"{weights.source}: quantization_config has the format int-quantized without input_activations; "
            "weights alone are quantized in the format pack-quantized."
        )
    return Int8Format()


def _packed_scheme(weights: Fields) -> GroupScheme:
    strategy = weights.text("strategy", "")
    if strategy not in ("group", "channel"):
        weights.refuse("strategy", "must be 'group' or 'channel' in the format pack-quantized")
    return GroupScheme(
        bits=_bits(weights, "num_bits", (4, 8)),
        group_size=_group_size(weights) if strategy == "group" else None,
        symmetric=weights.flag("symmetric", True),
        act_order=weights.values.get("actorder") == "group",
    )


# ---- AWQ and GPTQ


def _awq(fields: Fields) -> CheckpointQuantization:
    if fields.text("version", "gemm").lower() != "gemm":
        fields.refuse("version", "must be 'gemm'")
    symmetric = not fields.flag("zero_point", True)
    scheme = GroupScheme(_bits(fields, "bits", (4,)), _group_size(fields), symmetric, False)
    return CheckpointQuantization(
        "awq",
        targets=(("Linear", scheme),),
        ignore=tuple(
            f"re:.*{re.escape(part)}" for part in fields.texts("modules_to_not_convert", [])
        ),
        dense=frozenset(
            {LinearRole.EMBEDDING, LinearRole.HEAD, LinearRole.ROUTER, LinearRole.WHOLE}
        ),
    )


def _gptq(fields: Fields) -> CheckpointQuantization:
    if fields.values.get("dynamic"):
        fields.refuse("dynamic", "must be empty: rules for single modules are not supported")
    layout = fields.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        fields.refuse("checkpoint_format", "must be 'gptq' or 'gptq_v2'")
    scheme = GroupScheme(
        bits=_bits(fields, "bits", (4, 8)),
        group_size=_group_size(fields),
        symmetric=fields.flag("sym", True),
        act_order=fields.flag("desc_act", False),
    )
    modules = _module_names(fields, "modules_in_block_to_quantize")
    ends = [rf"re:.*\.{re.escape(module)}$" for module in modules]
    dense = {LinearRole.EMBEDDING, LinearRole.ROUTER, LinearRole.WHOLE}  # no file lists routers
    return CheckpointQuantization(
        "gptq_v2" if layout == "gptq_v2" else "gptq",
        targets=tuple((target, scheme) for target in ([*ends, "lm_head"] if ends else ["Linear"])),
        dense=frozenset(dense if fields.flag("lm_head", False) else dense | {LinearRole.HEAD}),
    )


def _module_names(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of names, or of lists of names."""
    value = fields.values.get(name)
    if not isinstance(value, list):
        return tuple(fields.texts(name, []))
    names = [item for inner in value for item in (inner if isinstance(inner, list) else [inner])]
    flat = Fields({name: names}, fields.source, "quantization_config.")
    return tuple(flat.texts(name))


def _bits(fields: Fields, name: str, supported: tuple[int, ...]) -> int:
    bits = fields.positive(name)
    if bits not in supported:
        fields.refuse(name, f"must be {' or '.join(str(known) for known in supported)}")
    return bits


def _group_size(fields: Fields) -> int | None:
    """None where the file says -1: all inputs are one group."""
    if fields.values.get("group_size") == -1:
        return None
    return fields.positive("group_size")
