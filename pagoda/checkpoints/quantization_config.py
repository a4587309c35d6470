"""Formats of ready-made quantized checkpoints, read from config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_config import LinearSpec, Role
from pagoda.checkpoints.weight_formats import (
    DenseFormat,
    GroupedFormat,
    Int8Format,
    WeightFormat,
    held_group_size,
)
from pagoda.errors import ConfigError

_SUPPORTED = (
    "compressed-tensors (int8 weights and inputs, or packed int4 and int8 weights), awq (4 bits) and "
    "gptq (4 and 8 bits)"
)


@dataclass(frozen=True)
class Int8Scheme:
    """W8A8 of compressed-tensors: a scale for each output, and one for each row of inputs, worked out anew."""

    summary = "int8 weights"

    def format_of(self, linear: LinearSpec) -> WeightFormat:  # noqa: ARG002 - any layer
        return Int8Format()


@dataclass(frozen=True)
class GroupScheme:
    """Integers with a scale, and perhaps a zero point, for each group of inputs."""

    bits: int
    group_size: int | None
    """None: all inputs are one group."""
    symmetric: bool
    act_order: bool

    @property
    def summary(self) -> str:
        groups = "one group" if self.group_size is None else f"groups of {self.group_size}"
        return f"int{self.bits} weights ({groups})"

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        return GroupedFormat(
            bits=self.bits,
            group_size=held_group_size(linear.name, linear.inputs, self.group_size),
            offsets=not self.symmetric,
            act_order=self.act_order,
        )


Scheme = Int8Scheme | GroupScheme


@dataclass(frozen=True)
class CompressedTensors:
    """Neural Magic's format; a target is a map's name, `re:` and a pattern, or `Linear` for all."""

    targets: tuple[tuple[str, Scheme], ...]
    ignore: tuple[str, ...]

    @property
    def summary(self) -> str:
        kinds = dict.fromkeys(scheme.summary for _, scheme in self.targets)
        return f"compressed-tensors {' and '.join(kinds)}"

    def scheme_of(self, linear: LinearSpec) -> Scheme | None:
        ignored = any(_matches(pattern, linear.name) for pattern in self.ignore)
        if linear.role is Role.EMBEDDING or ignored:
            return None
        for wanted in (linear.name, "Linear"):
            for target, scheme in self.targets:
                if _matches(target, wanted):
                    return scheme
        return None

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        return _format_of(self.scheme_of(linear), linear)


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's `gemm` layout."""

    scheme: GroupScheme
    not_converted: tuple[str, ...]
    """Parts of the names of maps that stay dense."""

    @property
    def summary(self) -> str:
        return f"awq {self.scheme.summary}"

    def scheme_of(self, linear: LinearSpec) -> GroupScheme | None:
        if linear.role in (Role.EMBEDDING, Role.HEAD, Role.ROUTER):
            return None
        return None if any(part in linear.name for part in self.not_converted) else self.scheme

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        return _format_of(self.scheme_of(linear), linear)


@dataclass(frozen=True)
class Gptq:
    scheme: GroupScheme
    zero_offset: int
    """Amount to add to a stored zero point: 1 in `gptq`, 0 in `gptq_v2`."""
    head: bool
    modules: tuple[str, ...]
    """Ends of the names of the maps in layers that are quantized; all where empty."""

    @property
    def summary(self) -> str:
        return f"gptq {self.scheme.summary}"

    def scheme_of(self, linear: LinearSpec) -> GroupScheme | None:
        if linear.role is Role.HEAD:
            return self.scheme if self.head else None
        if linear.role in (Role.EMBEDDING, Role.ROUTER):  # no file lists routers
            return None
        ends = tuple(f".{module}" for module in self.modules)
        return self.scheme if not ends or linear.name.endswith(ends) else None

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        return _format_of(self.scheme_of(linear), linear)


CheckpointQuantization = CompressedTensors | Awq | Gptq


def parse_quantization(config: Fields) -> CheckpointQuantization | None:
    """`quantization_config` of a config.json; None where there is none.

    Raises:
        ConfigError: it is not valid, or asks for what Pagoda does not do.
    """
    fields = config.table("quantization_config")
    default = ""
    if fields is None:
        fields, default = config.table("compression_config"), "compressed-tensors"
    if fields is None:
        return None
    method = fields.text("quant_method", default)
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    if method == "awq":
        return _awq(fields)
    if method != "gptq":
        fields.refuse("quant_method", f"must be one that Pagoda reads, {_SUPPORTED}")
    return _gptq(fields)


def _format_of(scheme: Scheme | None, linear: LinearSpec) -> WeightFormat:
    return DenseFormat() if scheme is None else scheme.format_of(linear)


def _matches(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == name


# ---- compressed-tensors


def _compressed_tensors(fields: Fields) -> CompressedTensors:
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
    return CompressedTensors(tuple(targets), _patterns(fields, "ignore"))


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
    if weights.text("type", "int") != "int":
        weights.refuse("type", f"must be 'int'; Pagoda reads {_SUPPORTED}")
    rounded_inputs = _check_inputs(group.table("input_activations"))
    if layout == "int-quantized":
        return _int8_scheme(weights, rounded_inputs)
    if layout == "pack-quantized":
        return _packed_scheme(weights)
    raise ConfigError(
        f"{group.source}: quantization_config.format must be 'int-quantized' or 'pack-quantized', "
        f"got {layout!r}."
    )


def _check_inputs(inputs: Fields | None) -> bool:
    """Returns True if inputs are quantized; only quantization for each token is supported."""
    if inputs is None:
        return False
    if inputs.text("type", "int") != "int":
        inputs.refuse("type", "must be 'int'")
    if inputs.positive("num_bits", 8) != 8:
        inputs.refuse("num_bits", "must be 8")
    if inputs.values.get("dynamic") is not True:
        inputs.refuse("dynamic", "must be true: static scales of inputs are not supported")
    if not inputs.flag("symmetric", True):
        inputs.refuse("symmetric", "must be true: zero points of inputs are not supported")
    if inputs.text("strategy", "token") != "token":
        inputs.refuse("strategy", "must be 'token'")
    return True


def _int8_scheme(weights: Fields, rounded_inputs: bool) -> Int8Scheme:
    if weights.positive("num_bits") != 8:
        weights.refuse("num_bits", "must be 8 in the format int-quantized")
    if weights.text("strategy", "") != "channel":
        weights.refuse("strategy", "must be 'channel' in the format int-quantized")
    if not weights.flag("symmetric", True):
        weights.refuse("symmetric", "must be true in the format int-quantized")
    if not rounded_inputs:
        raise ConfigError(
            f"{weights.source}: quantization_config has the format int-quantized without input_activations; "
            "weights alone are quantized in the format pack-quantized."
        )
    return Int8Scheme()


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


def _awq(fields: Fields) -> Awq:
    if fields.text("version", "gemm").lower() != "gemm":
        fields.refuse("version", "must be 'gemm'")
    return Awq(
        scheme=GroupScheme(
            bits=_bits(fields, "bits", (4,)),
            group_size=_group_size(fields),
            symmetric=not fields.flag("zero_point", True),
            act_order=False,
        ),
        not_converted=tuple(fields.texts("modules_to_not_convert", [])),
    )


def _gptq(fields: Fields) -> Gptq:
    if fields.values.get("dynamic"):
        fields.refuse("dynamic", "must be empty: rules for single modules are not supported")
    layout = fields.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        fields.refuse("checkpoint_format", "must be 'gptq' or 'gptq_v2'")
    return Gptq(
        scheme=GroupScheme(
            bits=_bits(fields, "bits", (4, 8)),
            group_size=_group_size(fields),
            symmetric=fields.flag("sym", True),
            act_order=fields.flag("desc_act", False),
        ),
        zero_offset=1 if layout == "gptq" else 0,
        head=fields.flag("lm_head", False),
        modules=_module_names(fields, "modules_in_block_to_quantize"),
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
