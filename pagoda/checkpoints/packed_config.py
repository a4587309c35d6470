# SPDX-License-Identifier: Apache-2.0
"""Formats of AWQ, GPTQ and auto-round, which pack small integers into words, read from config.json."""

from __future__ import annotations

import re

from pagoda.checkpoints.checkpoint_quantization import (
    CheckpointQuantization,
    GroupScheme,
    Layout,
    Scheme,
)
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.linears import LinearRole

_UNPACKED = frozenset({LinearRole.EMBEDDING, LinearRole.HEAD, LinearRole.ROUTER, LinearRole.WHOLE})
"""Roles of layers that files have as plain numbers, as a rule; no file lists routers."""
_AWQ_LAYOUTS: dict[str, Layout] = {"gemm": "awq", "gemv": "awq_gemv"}
_GPTQ_LAYOUTS: dict[str, Layout] = {"gptq": "gptq", "gptq_v2": "gptq_v2", "marlin": "marlin"}
_AUTO_ROUND_PACKINGS: dict[str, Layout] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
_DENSE_BITS = 16
"""Bits from which on auto-round leaves a layer as it is."""


def awq(fields: Fields) -> CheckpointQuantization:
    """4 bits in AutoAWQ's layouts `gemm` and `gemv`."""
    version = fields.text("version", "gemm").lower()
    if version not in _AWQ_LAYOUTS:
        fields.refuse("version", "must be 'gemm' or 'gemv'")
    symmetric = not fields.flag("zero_point", True)
    scheme = GroupScheme(_bits(fields, "bits", (4,)), _group_size(fields), symmetric, False)
    return CheckpointQuantization(
        _AWQ_LAYOUTS[version],
        targets=(("Linear", scheme),),
        ignore=tuple(
            f"re:.*{re.escape(part)}" for part in fields.texts("modules_to_not_convert", [])
        ),
        dense=_UNPACKED,
    )


def gptq(fields: Fields) -> CheckpointQuantization:
    """2, 3, 4 or 8 bits in the layouts of AutoGPTQ and GPTQModel, or 4 in that of Marlin."""
    if fields.values.get("dynamic"):
        fields.refuse("dynamic", "must be empty: rules for single modules are not supported")
    layout = _gptq_layout(fields)
    scheme = GroupScheme(
        bits=_bits(fields, "bits", (4,) if layout == "marlin" else (2, 3, 4, 8)),
        group_size=_group_size(fields),
        symmetric=fields.flag("sym", True),
        act_order=fields.flag("desc_act", False),
    )
    if layout == "marlin" and (scheme.act_order or not scheme.symmetric):
        fields.refuse("sym", "must be true, and desc_act false, in the layout of Marlin")
    modules = _module_names(fields, "modules_in_block_to_quantize")
    ends = [rf"re:.*\.{re.escape(module)}$" for module in modules]
    return CheckpointQuantization(
        layout,
        targets=tuple((target, scheme) for target in ([*ends, "lm_head"] if ends else ["Linear"])),
        dense=_UNPACKED - ({LinearRole.HEAD} if fields.flag("lm_head", False) else set()),
    )


def _gptq_layout(fields: Fields) -> Layout:
    if fields.flag("is_marlin_format", False):
        return "marlin"
    layout = fields.text("checkpoint_format", "gptq")
    if layout not in _GPTQ_LAYOUTS:
        fields.refuse("checkpoint_format", "must be 'gptq', 'gptq_v2' or 'marlin'")
    return _GPTQ_LAYOUTS[layout]


def auto_round(fields: Fields) -> CheckpointQuantization:
    """Layers in GPTQ's or AWQ's layout, some perhaps with numbers of their own (`extra_config`)."""
    packing = fields.text("packing_format", "auto_round:auto_gptq")
    if packing not in _AUTO_ROUND_PACKINGS:
        known = " or ".join(map(repr, _AUTO_ROUND_PACKINGS))
        fields.refuse("packing_format", f"must be {known}")
    if fields.text("data_type", "int") != "int":
        fields.refuse("data_type", "must be 'int'")
    own = fields.table("extra_config") or Fields({}, fields.source)
    targets: list[tuple[str, Scheme]] = []
    ignore = []
    for name in own.values:
        layer = (own.table(name) or own).values
        numbers = {key: value for key, value in layer.items() if value is not None}
        merged = fields.updated(numbers)
        target = _auto_round_name(own, name)
        if merged.positive("bits") >= _DENSE_BITS:
            ignore.append(target)
        else:
            targets.append((target, _auto_round_scheme(merged, packing)))
    has_head = any(target == "lm_head" for target, _ in targets)
    return CheckpointQuantization(
        _AUTO_ROUND_PACKINGS[packing],
        (*targets, ("Linear", _auto_round_scheme(fields, packing))),
        tuple(ignore),
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


def _auto_round_scheme(fields: Fields, packing: str) -> GroupScheme:
    known = (4,) if packing.endswith("awq") else (2, 3, 4, 8)
    is_symmetric = fields.flag("sym", True)
    return GroupScheme(_bits(fields, "bits", known), _group_size(fields), is_symmetric, False)


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
