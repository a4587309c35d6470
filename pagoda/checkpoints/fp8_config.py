# SPDX-License-Identifier: Apache-2.0
"""Scales of fp8 checkpoints, read from config.json: one for a weight, an output, a group of inputs or a block.

Floats of 8 bits are those of Micikevicius et al. 2022; scales of blocks are those of DeepSeek-V3 (2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.weight_formats import FP8_INPUTS, DenseFormat, Fp8Format, WeightFormat
from pagoda.errors import ConfigError

_LAYOUTS = ("float-quantized", "naive-quantized", "mxfp8-quantized")
_LARGEST_BLOCK = 2**20
"""Outputs or inputs of a block at most."""
_BLOCK_RULE = "must be two positive integers, the outputs and inputs of a block"


@dataclass(frozen=True)
class Fp8Scheme:
    """Floats of 8 bits that share scales."""

    outputs: int | None
    """Outputs that share a scale; None: all of them."""
    inputs: int | None
    """Inputs that share a scale; None: all of them."""
    is_e4m3: bool = True
    """False if config.json says E5M2, which no backend keeps. compressed-tensors does not say it."""

    @property
    def summary(self) -> str:
        match self.outputs, self.inputs:
            case None, None:
                shared = "one scale each"
            case 1, None:
                shared = "by channel"
            case 1, inputs:
                shared = f"groups of {inputs}"
            case outputs, inputs:
                shared = f"blocks of {outputs} × {inputs}"
        return f"fp8 weights ({shared})"

    @property
    def stored_format(self) -> WeightFormat:
        """Format in memory, where the backend has 8-bit floats: each output has scales of its own."""
        if not self.is_e4m3 or (self.inputs is not None and self.inputs % FP8_INPUTS):
            return DenseFormat()
        return Fp8Format(self.inputs)

    def scales_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Shape of the scales of a weight [outputs, inputs], whose last blocks may be cut off."""
        return -(-outputs // (self.outputs or outputs)), -(-inputs // (self.inputs or inputs))


MXFP8 = Fp8Scheme(1, 32)
"""Groups whose scales are powers of two (OCP Microscaling Formats 1.0)."""


def compressed_tensors_scheme(weights: Fields, layout: str) -> Fp8Scheme:
    """Scheme of a group's `weights` whose type is float; inputs stay in their dtype whatever the group says."""
    if layout not in _LAYOUTS:
        known = " or ".join(map(repr, _LAYOUTS))
        raise ConfigError(
            f"{weights.source}: quantization_config.format must be {known} for weights of type float, "
            f"got {layout!r}."
        )
    if weights.values.get("num_bits") != 8:
        weights.refuse("num_bits", "must be 8 for weights of type float")
    if not weights.flag("symmetric", True):
        weights.refuse("symmetric", "must be true for weights of type float")
    strategy = weights.text("strategy", "tensor")
    if strategy == "block":
        return _blocks(weights, "block_structure")
    if strategy == "group":
        return Fp8Scheme(1, weights.positive("group_size"))
    if strategy not in ("tensor", "channel"):
        weights.refuse(
            "strategy", "must be 'tensor', 'channel', 'group' or 'block' for weights of type float"
        )
    return Fp8Scheme(1 if strategy == "channel" else None, None)


def fp8_scheme(fields: Fields) -> Fp8Scheme:
    """Scheme of `quant_method` `fp8`, with one scale for a weight or, as `weight_block_size` says, for a block."""
    numbers = fields.text("fmt", "e4m3").removeprefix("float8_").removesuffix("fn")
    if numbers not in ("e4m3", "e5m2"):
        fields.refuse("fmt", "must be 'e4m3' or 'e5m2'")
    has_blocks = fields.values.get("weight_block_size") is not None
    scheme = _blocks(fields, "weight_block_size") if has_blocks else Fp8Scheme(None, None)
    return replace(scheme, is_e4m3=numbers == "e4m3")


def _blocks(fields: Fields, name: str) -> Fp8Scheme:
    sizes = fields.values.get(name)
    if isinstance(sizes, str):  # `128x128`
        sizes = [int(it) if it.isdecimal() and len(it) < 9 else 0 for it in sizes.split("x")]
    if (
        not isinstance(sizes, list)
        or [type(size) for size in sizes] != [int, int]
        or not 1 <= min(sizes) <= max(sizes) <= _LARGEST_BLOCK
    ):
        fields.refuse(name, _BLOCK_RULE)
    return Fp8Scheme(*sizes)
