# SPDX-License-Identifier: Apache-2.0
"""Formats of AWQ, GPTQ and auto-round, which pack small integers into words, read from config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pagoda.checkpoints.checkpoint_quantization import (
    CheckpointQuantization,
    GroupScheme,
    Layout,
    Scheme,
)
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.fp8_config import MXFP8
from pagoda.checkpoints.linears import LinearRole
from pagoda.checkpoints.weight_formats import MXFP4, NVFP4

_UNPACKED = frozenset({LinearRole.EMBEDDING, LinearRole.HEAD, LinearRole.ROUTER, LinearRole.WHOLE})
"""Roles of layers that files have as plain numbers, as a rule; no file lists routers."""
_AWQ_LAYOUTS: dict[str, Layout] = {"gemm": "awq", "gemv": "awq_gemv"}
_GPTQ_LAYOUTS: dict[str, Layout] = {"gptq": "gptq", "gptq_v2": "gptq_v2", "marlin": "marlin"}
_FLOATS: Layout = "compressed-tensors"
_AUTO_ROUND_PACKINGS: dict[str, Layout] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round": "gptq_v2",
    "auto_round:llm_compressor": _FLOATS,
}
_AUTO_ROUND_FLOATS: dict[tuple[str, int], Scheme] = {
    ("mx_fp", 4): MXFP4,
    ("mx_fp", 8): MXFP8,
    ("nv_fp", 4): NVFP4,
}
"""Floats in llm-compressor's packing by `data_type` and bits."""
_DENSE_BITS = 16
"""Bits from which on auto-round leaves a layer as it is."""


def awq(fields: Fields) -> CheckpointQuantization:
    """4 bits in AutoAWQ's layouts `gemm` and `gemv`, whose own file (quant_config.json) has other names.

    Layers are left out by any part of their names, as in AutoAWQ; experts by those all share, as in vLLM."""
    older = {"bits": fields.values.get("w_bit"), "group_size": fields.values.get("q_group_size")}
    fields = fields.updated({name: it for name, it in older.items() if it is not None})
    kind = "version" if fields.values.get("version") is not None else "format"
    version = fields.text(kind, "gemm").lower()
    if version not in _AWQ_LAYOUTS:
        fields.refuse(kind, "must be 'gemm' or 'gemv'")
    symmetric = not fields.flag("zero_point", True)
    listed = fields.texts("modules_to_not_convert", [])
    scheme = GroupScheme(_bits(fields, "bits", (4,)), _group_size(fields), symmetric, False)
    return CheckpointQuantization(
        _AWQ_LAYOUTS[version],
        targets=(("Linear", scheme),),
        ignore=(*parts_of_names(listed), *(f"in:{name}" for name in listed if name)),
        dense=_UNPACKED,
    )


def gptq(fields: Fields) -> CheckpointQuantization:
    """2, 3, 4 or 8 bits in the layouts of AutoGPTQ and GPTQModel, or 4 in that of Marlin."""
    layout = _gptq_layout(fields)
    scheme = _gptq_scheme(fields, layout)
    targets: list[tuple[str, Scheme | None]] = _dynamic_rules(fields, layout)
    names = _module_names(fields, "modules_in_block_to_quantize")
    parts = parts_of_names((*names, "lm_head")) if names else ("Linear",)
    targets += [(target, scheme) for target in parts]
    return CheckpointQuantization(
        layout,
        tuple(targets),
        dense=_UNPACKED - ({LinearRole.HEAD} if fields.flag("lm_head", False) else set()),
    )


def _gptq_scheme(fields: Fields, layout: Layout) -> GroupScheme:
    scheme = GroupScheme(
        bits=_bits(fields, "bits", (4,) if layout == "marlin" else (2, 3, 4, 8)),
        group_size=_group_size(fields),
        symmetric=fields.flag("sym", True),
        act_order=fields.flag("desc_act", False),
    )
    if layout == "marlin" and (scheme.act_order or not scheme.symmetric):
        fields.refuse("sym", "must be true, and desc_act false, in the layout of Marlin")
    return scheme


def _dynamic_rules(fields: Fields, layout: Layout) -> list[tuple[str, Scheme | None]]:
    """GPTQModel's rules for single layers, of which the first that matches a name counts: patterns, behind `-:` of
    layers that stay dense, else with numbers of their own. Some files have one for each layer."""
    rules = fields.table("dynamic") or Fields({}, fields.source)
    patterns: list[re.Pattern[str]] = []
    targets: list[tuple[str, Scheme | None]] = []
    for rule in rules.values:
        pattern = rule.removeprefix("-:").removeprefix("+:")
        own = rules.table(rule) or rules
        scheme = None
        if not rule.startswith("-:"):
            scheme = _gptq_scheme(fields.updated(own.values), layout)
        name = _only_name(pattern)
        if name is None:
            patterns.append(fields.pattern("dynamic", pattern))
            targets.append((f"re:{pattern}", scheme))
        elif not any(earlier.match(name) for earlier in patterns):
            targets.append((name, scheme))
    return targets


def _only_name(pattern: str) -> str | None:
    """The only name that a pattern matches; None if there may be more."""
    name = pattern.removeprefix("^").removesuffix("$").replace(r"\.", ".")
    return name if pattern == f"^{re.escape(name)}$" else None


def _gptq_layout(fields: Fields) -> Layout:
    if fields.flag("is_marlin_format", False):
        return "marlin"
    kind = "checkpoint_format" if fields.values.get("checkpoint_format") is not None else "format"
    layout = fields.text(kind, "gptq")
    if layout not in _GPTQ_LAYOUTS:
        fields.refuse(kind, "must be 'gptq', 'gptq_v2' or 'marlin'")
    return _GPTQ_LAYOUTS[layout]


def auto_round(fields: Fields) -> CheckpointQuantization:
    """Layers in GPTQ's, AWQ's or llm-compressor's layout, some with numbers of their own (`extra_config`)."""
    packing = fields.text("packing_format", "auto_round:auto_gptq")
    if packing not in _AUTO_ROUND_PACKINGS:
        known = " or ".join(map(repr, _AUTO_ROUND_PACKINGS))
        fields.refuse("packing_format", f"must be {known}")
    layout = _AUTO_ROUND_PACKINGS[packing]
    usual = _auto_round_scheme(fields, layout)
    own = fields.table("extra_config") or Fields({}, fields.source)
    targets: list[tuple[str, Scheme | None]] = []
    for name in own.values:
        layer = (own.table(name) or own).values
        merged = fields.updated({key: value for key, value in layer.items() if value is not None})
        is_dense = merged.positive("bits") >= _DENSE_BITS
        scheme = None if is_dense else _auto_round_scheme(merged, layout)
        targets.append((_auto_round_name(own, name), scheme))
    has_head = any(target == "lm_head" and it is not None for target, it in targets)
    return CheckpointQuantization(
        layout,
        (*targets, ("Linear", usual)),
        dense=_UNPACKED - ({LinearRole.HEAD} if has_head else set()),
    )


def _auto_round_name(config: Fields, name: str) -> str:
    """Names with signs of regular expressions are such."""
    if re.fullmatch(r"[\w.\-]+", name):
        return name
    try:
        re.compile(name)
    except (re.error, RecursionError, OverflowError):
        config.refuse(name, "must be a name or a valid regular expression")
    return f"re:.*(?:{name})"


def _auto_round_scheme(fields: Fields, layout: Layout) -> Scheme:
    if layout == _FLOATS:
        kind = fields.text("data_type", "int").removesuffix("_rceil"), fields.positive("bits")
        if kind not in _AUTO_ROUND_FLOATS:
            known = ", ".join(f"{name} of {bits} bits" for name, bits in _AUTO_ROUND_FLOATS)
            fields.refuse("data_type", f"must be {known} in llm-compressor's packing")
        return _AUTO_ROUND_FLOATS[kind]
    if fields.text("data_type", "int") != "int":
        fields.refuse("data_type", "must be 'int' in this packing")
    known_bits = (4,) if layout == "awq" else (2, 3, 4, 8)
    is_symmetric = fields.flag("sym", True)
    return GroupScheme(_bits(fields, "bits", known_bits), _group_size(fields), is_symmetric, False)


def _module_names(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of names, or of lists of names."""
    value = fields.values.get(name)
    if not isinstance(value, list):
        return tuple(fields.texts(name, []))
    names = [item for inner in value for item in (inner if isinstance(inner, list) else [inner])]
    flat = Fields({name: names}, fields.source, "quantization_config.")
    return tuple(flat.texts(name))


def parts_of_names(listed: Iterable[str]) -> tuple[str, ...]:
    """Targets of layers by words of their names, or by beginnings of these up to a dot."""
    return tuple(f"~{name.strip('.')}" for name in listed if name)


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
