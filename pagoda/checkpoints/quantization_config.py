# SPDX-License-Identifier: Apache-2.0
"""Formats of ready-made quantized checkpoints, read from config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization, Layout
from pagoda.checkpoints.compressed_tensors_config import compressed_tensors
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.fp8_config import Fp8Scheme, fp8_scheme
from pagoda.checkpoints.linears import LinearRole
from pagoda.checkpoints.modelopt_config import modelopt
from pagoda.checkpoints.packed_config import auto_round, awq, gptq, parts_of_names
from pagoda.checkpoints.quark_config import quark
from pagoda.checkpoints.weight_formats import FP4, MXFP4, NF4, TERNARY, Int8Format

_SUPPORTED = (
    "compressed-tensors (fp8, int8 weights and inputs, packed int4 and int8 weights, nvfp4, mxfp4), modelopt "
    "(FP8, MXFP8 and NVFP4), fp8, fbgemm_fp8, quark (fp8, int8, mxfp4), bitsandbytes (nf4, fp4 and int8), awq "
    "(4 bits), gptq (2, 3, 4 and 8 bits), auto-round (as these two, mxfp4, mxfp8, nvfp4), bitnet and mxfp4"
)
_READERS: Mapping[str, Callable[[Fields], CheckpointQuantization | None]] = {
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
    "quark": quark,
    "awq": awq,
    "gptq": gptq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
}


def parse_quantization(config: Fields) -> CheckpointQuantization | None:
    """`quantization_config` of a config.json; None where there is none."""
    fields = config.table("quantization_config")
    default = ""
    if fields is None:
        fields, default = config.table("compression_config"), "compressed-tensors"
    if fields is None:
        return None
    method = fields.text("quant_method", default).lower().replace("_tensors", "-tensors")
    if method == "fbgemm_fp8":
        return CheckpointQuantization("fp8", (("Linear", Fp8Scheme(1, None)),), dense=frozenset())
    if method == "fp8":
        # Files say by the types of their tensors which are fp8; lists of names are written in several languages.
        scheme = fp8_scheme(fields)
        return CheckpointQuantization("fp8", (("Linear", scheme),), dense=frozenset())
    if method == "mxfp4":
        return _mxfp4(fields)
    if method == "bitsandbytes":
        return _bitsandbytes(fields)
    if method == "bitnet":
        return _bitnet(fields)
    if method not in _READERS:
        fields.refuse("quant_method", f"must be one that Pagoda reads, {_SUPPORTED}")
    return _READERS[method](fields)


def _mxfp4(fields: Fields) -> CheckpointQuantization:
    """4-bit floats of experts, as gpt-oss has them."""
    name = "modules_to_not_convert"
    if any("experts" in module for module in fields.texts(name, [])):
        fields.refuse(name, "must not name experts, the layers that mxfp4 is for")
    dense = frozenset(LinearRole) - {LinearRole.EXPERT_IN, LinearRole.EXPERT_OUT}
    return CheckpointQuantization("mxfp4", (("Linear", MXFP4),), dense=dense)


def _bitsandbytes(fields: Fields) -> CheckpointQuantization:
    """Quantiles or floats of 4 bits with the highest magnitude of a block, or int8 with that of an output."""
    kind = fields.text("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        fields.refuse("bnb_4bit_quant_type", "must be 'nf4' or 'fp4'")
    is_int8 = fields.flag("load_in_8bit", False)
    if is_int8 == fields.flag("load_in_4bit", False):
        fields.refuse("load_in_4bit", "must be true, or load_in_8bit, but not both")
    listed = fields.texts("llm_int8_skip_modules", ["lm_head"])
    return CheckpointQuantization(
        "bitsandbytes",
        (("Linear", Int8Format() if is_int8 else NF4 if kind == "nf4" else FP4),),
        ignore=parts_of_names(listed),
    )


def _bitnet(fields: Fields) -> CheckpointQuantization:
    """One of -1, 0 and 1 for each weight, with one scale for all of a map."""
    fields.require("use_rms_norm", False)
    kinds: Mapping[tuple[str, str], Layout] = {
        ("autobitlinear", "offline"): "bitnet",
        ("autobitlinear", "online"): "bitnet_online",
    }
    kind, mode = (
        fields.text("linear_class", "bitlinear"),
        fields.text("quantization_mode", "offline"),
    )
    if kind not in ("bitlinear", "autobitlinear"):
        fields.refuse("linear_class", "must be 'bitlinear' or 'autobitlinear'")
    if mode not in ("offline", "online"):
        fields.refuse("quantization_mode", "must be 'offline' or 'online'")
    return CheckpointQuantization(
        kinds.get((kind, mode), "bitnet_inverse"),
        (("Linear", TERNARY),),
        ignore=parts_of_names(fields.texts("modules_to_not_convert", ["lm_head"])),
    )
