# SPDX-License-Identifier: Apache-2.0
"""Linear layers of ready-made quantized checkpoints, and how each is quantized."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pagoda.checkpoints.fp8_config import Fp8Scheme
from pagoda.checkpoints.linears import NEVER_ROUNDED, LinearRole, LinearSpec
from pagoda.checkpoints.tensor_names import TEXT_PARTS
from pagoda.checkpoints.weight_formats import (
    FP4,
    MXFP4,
    NF4,
    NVFP4,
    TERNARY,
    BlockFormat,
    DenseFormat,
    Fp8Format,
    GroupedFormat,
    Int8Format,
    Quantization,
    WeightFormat,
    held_block_format,
    held_group_size,
)


@dataclass(frozen=True)
class GroupScheme:
    """Integers with a scale, and perhaps a zero point, for each group of inputs."""

    bits: int
    """2, 3, 4 or 8; 3 take 4 in memory, as do 2 in act-order."""
    group_size: int | None
    """None: all inputs are one group."""
    symmetric: bool
    act_order: bool

    def blocks(self, size: int) -> BlockFormat | None:
        """Blocks of ggml's Q2_K with groups of `size` inputs, and scales and minima that are all one, which hold 2
        bits; None where they do not hold the layer."""
        if self.bits != 2 or self.act_order:
            return None
        return BlockFormat(2, 16, size, integer_scales=True, minima=True)


Scheme = Int8Format | GroupScheme | Fp8Scheme | BlockFormat
"""Int8: a scale for each output, and one for each row of inputs, worked out anew."""
_BLOCKS = {
    **{MXFP4: "mxfp4 weights", NVFP4: "nvfp4 weights (groups of 16)"},
    **{NF4: "nf4 weights", FP4: "fp4 weights", TERNARY: "ternary weights"},
}
_DENSE_IN_FP8 = NEVER_ROUNDED | {LinearRole.EMBEDDING, LinearRole.HEAD}
_DOT = re.compile(r"\.")
_Words = Literal["awq", "awq_gemv", "gptq", "gptq_v2", "marlin"]
_Ternary = Literal["bitnet", "bitnet_inverse", "bitnet_online"]
_Others = Literal["compressed-tensors", "modelopt", "quark", "fp8", "bitsandbytes", "mxfp4"]
Layout = _Words | _Ternary | _Others
"""`awq` is AutoAWQ's `gemm`. `gptq` stores zero points less one, `gptq_v2` as they are, `marlin` none. `bitnet`
has a factor of ternary weights, `bitnet_inverse` a divisor, `bitnet_online` weights that are yet to be rounded."""


@dataclass(frozen=True)
class CheckpointQuantization:
    """Linear layers of a checkpoint that are quantized, and how."""

    layout: Layout
    targets: tuple[tuple[str, Scheme | None], ...]
    """Schemes by layer: a name, a beginning of names that ends with a dot, `re:` and a pattern that names begin
    with, `~` and parts of a name between dots, `in:` and any part of a name, up to the word `experts` if there is
    one, or `Linear` for all others. Layers of None stay dense."""
    ignore: tuple[str, ...] = ()
    """Layers that stay dense, whatever else names them."""
    dense: frozenset[LinearRole] = frozenset({LinearRole.EMBEDDING, LinearRole.WHOLE})
    keeps_fp8: bool = False
    """True if 8-bit floats stay what they are in memory; else they become dense as they are loaded."""

    @property
    def summary(self) -> str:
        if self.layout == "mxfp4":
            return "mxfp4 weights of experts"
        kinds = " and ".join(dict.fromkeys(self._summary(scheme) for scheme in self.schemes))
        layout = self.layout.partition("_")[0]
        return kinds if self.layout == "fp8" else f"{layout} {kinds}"

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        return tuple(scheme for _, scheme in self.targets if scheme is not None)

    def scheme_of(self, linear: LinearSpec) -> Scheme | None:
        """Scheme of a layer; None if it is dense."""
        names = _names(linear.stored.tensor)
        if linear.role in self.dense or self._ignored.find(names) is not None:
            return None
        found = self._targeted.find(names) or self._targeted.find(["Linear"])
        return found[0] if found else None

    @cached_property
    def _ignored(self) -> _Patterns:
        return _Patterns((name, None) for name in self.ignore)

    @cached_property
    def _targeted(self) -> _Patterns:
        return _Patterns(self.targets)

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        scheme = self.scheme_of(linear)
        if scheme is None or linear.role is LinearRole.LATENT_HEADS or linear.fill is not None:
            return DenseFormat()
        if isinstance(scheme, Fp8Scheme):
            # Tables, heads and routers are left out of fp8 checkpoints, as a rule, whatever config.json says.
            is_kept = self.keeps_fp8 and linear.role not in _DENSE_IN_FP8
            return scheme.stored_format if is_kept else DenseFormat()
        if isinstance(scheme, Int8Format):
            return scheme
        if isinstance(scheme, BlockFormat):
            return held_block_format(scheme, linear.inputs)
        size = held_group_size(linear.name, linear.inputs, scheme.group_size)
        return scheme.blocks(size) or GroupedFormat(
            bits=max(scheme.bits, 4),
            group_size=size,
            offsets=not scheme.symmetric,
            act_order=scheme.act_order,
        )

    @property
    def is_held_in_fp8(self) -> bool:
        """True if all layers that are quantized are 8-bit floats in memory."""
        return all(self._keeps(scheme) for scheme in self.schemes)

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
        and all(isinstance(scheme, Fp8Scheme) for scheme in quantization.schemes)
    )


def _summary(scheme: Int8Format | GroupScheme | BlockFormat) -> str:
    if isinstance(scheme, Int8Format):
        return "int8 weights"
    if isinstance(scheme, BlockFormat):
        return _BLOCKS[scheme]
    size = scheme.group_size
    return f"int{scheme.bits} weights ({'one group' if size is None else f'groups of {size}'})"


class _Patterns:
    """Values by names, beginnings of names, parts of names and patterns, as `CheckpointQuantization.targets` has
    them."""

    def __init__(self, values: Iterable[tuple[str, Scheme | None]]) -> None:
        self._named: dict[str, Scheme | None] = {}
        self._parts: dict[str, Scheme | None] = {}
        self._within: dict[str, Scheme | None] = {}
        self._patterns: list[tuple[re.Pattern[str], Scheme | None]] = []
        for target, value in values:
            if target.startswith("re:"):
                self._patterns.append((re.compile(target[3:]), value))
            elif target.startswith("~"):
                self._parts.setdefault(target[1:], value)
            elif target.startswith("in:"):
                self._within.setdefault(target[3:], value)
            else:
                self._named.setdefault(target, value)

    @cached_property
    def _lengths(self) -> frozenset[int]:
        return frozenset(map(len, self._within))

    def find(self, names: Sequence[str]) -> tuple[Scheme | None] | None:
        """The value of the first that matches one of a layer's names, of names before patterns, and these before
        parts."""
        for name in names:
            for known in (name, *(name[: dot.end()] for dot in _DOT.finditer(name))):
                if known in self._named:
                    return (self._named[known],)
        for pattern, value in self._patterns:
            if any(pattern.match(name) for name in names):
                return (value,)
        for name in names if self._parts else ():
            for part in _parts_of(name):
                if part in self._parts:
                    return (self._parts[part],)
        for name in names if self._within else ():
            for text in _texts_within(name, self._lengths):
                if text in self._within:
                    return (self._within[text],)
        return None


def _parts_of(name: str) -> Iterator[str]:
    words = name.split(".")
    for first in range(len(words)):
        for last in range(len(words), first, -1):
            yield ".".join(words[first:last])


def _texts_within(name: str, lengths: Iterable[int]) -> Iterator[str]:
    head, experts, _ = name.partition(".experts.")
    name = head + experts.removesuffix(".")
    for length in lengths:
        for first in range(len(name) - length + 1):
            yield name[first : first + length]


def _names(name: str) -> list[str]:
    """Names of a layer, also as part of a model that sees or hears."""
    inner = name.removeprefix("model.")
    return [name, *(it for part in TEXT_PARTS for it in (f"{part}{name}", f"model.{part}{inner}"))]
