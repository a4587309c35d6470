# SPDX-License-Identifier: Apache-2.0
"""Scalings of rotary position embeddings, as config.json files spell them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pagoda.checkpoints.fields import Fields
from pagoda.errors import ConfigError

_LONGEST = 2**31 - 1
"""Tokens of the longest sequence whose positions are numbered."""
_MOST_ALPHA = 1e6
"""Largest factor of the base of dynamic scaling: Hunyuan has 1,000."""


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones kept, those between blended (Llama 3.1).

    None lie between where both bounds are the same (Llama 4 Scout)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """NTK-by-parts interpolation, with attention scaled by `attention_factor` (Peng et al. 2023)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool

    def temperature(self, mscale: float) -> float:
        """Factor of queries, and of keys, that makes up for interpolation (part 3.4)."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency is divided by a number of its own (how GGUF files write `Llama3Scaling`)."""

    factors: tuple[float, ...]
    """One number for each pair of dimensions."""


@dataclass(frozen=True)
class LongRopeScaling:
    """Each frequency is divided by a number of its own, other ones where sequences may be long (Ding et al. 2024).

    As in vLLM and llama.cpp, the longest sequence that a server takes decides for all, so that keys in the cache
    are rotated alike.
    """

    short_factors: tuple[float, ...]
    """One number for each pair of dimensions, for sequences up to the original length."""
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    """Factor of cosines and sines."""
    short_attention_factor: float
    """The same for sequences up to the original length."""

    def scale(self, max_length: int) -> float:
        return self.attention_factor if self.is_long(max_length) else self.short_attention_factor

    def factors(self, max_length: int) -> tuple[float, ...]:
        return self.long_factors if self.is_long(max_length) else self.short_factors

    def is_long(self, max_length: int) -> bool:
        return max_length > self.original_max_position_embeddings


@dataclass(frozen=True)
class NtkScaling:
    """The base is times `factor`, and angles are divided by a root of it (Su 2023; GTE)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with the longest sequence, if that is beyond the original length (dynamic NTK, bloc97 2023).

    As in vLLM, the longest sequence that a server takes decides for all, so that keys in the cache are alike.
    """

    factor: float
    original_max_position_embeddings: int

    def base_factor(self, max_length: int, dim: int) -> float:
        """The factor of the base of the wavelengths of `dim` rotated dimensions."""
        original = self.original_max_position_embeddings
        if max_length <= original:
            return 1.0
        grown = self.factor * max_length / original - (self.factor - 1)
        return float(grown ** (dim / (dim - 2)))


@dataclass(frozen=True)
class ProportionalScaling:
    """The first frequencies are those of all of a head's, over `factor`; the others are 0 (Gemma 4)."""

    factor: float
    pairs: int
    """Frequencies that are not 0."""


RopeScaling = (
    DynamicScaling
    | LinearScaling
    | NtkScaling
    | Llama3Scaling
    | YarnScaling
    | FrequencyFactors
    | LongRopeScaling
    | ProportionalScaling
)


@dataclass(frozen=True)
class RotarySpec:
    """A rotary table: angles by which pairs of dimensions of a head turn from token to token (Su et al. 2021)."""

    dim: int
    """Dimensions of a head that are rotated, the first ones; 0 where positions are not told (NoPE)."""
    theta: float
    """Base of the wavelengths."""
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class TemperatureSpec:
    """Scale of queries: 1 + factor log(1 + floor((position + offset) / period)) (Nakanishi 2025)."""

    period: float
    factor: float
    offset: float


def parse_rope(fields: Fields, head_dim: int, partial: float | None) -> RotarySpec:
    """The rotary table, spelled the old way (`rope_scaling`, `rope_theta`) or as `rope_parameters`.

    Where the file is silent, the part `partial` of a head is rotated; None: all of it is, whatever the file says.
    A file may have a table for each kind of layers: then this is the one of layers that see all.
    """
    fields = rope_of_kind(fields, "full_attention") or fields
    scaling, theta = _scaling_and_theta(fields)
    rope = rope_table(fields) or Fields({}, fields.source)
    own = rope if rope.values.get("partial_rotary_factor") is not None else fields
    if isinstance(scaling, ProportionalScaling):
        pairs = int(min(own.number("partial_rotary_factor", 1.0), 1.0) * head_dim // 2)
        return RotarySpec(head_dim, theta, replace(scaling, pairs=min(pairs, head_dim // 2)))
    if partial is None:
        own.require("partial_rotary_factor", 1)
    factor = own.number("partial_rotary_factor", 1.0 if partial is None else partial)
    rotated = int(head_dim * min(factor, 2.0))
    if rotated % 2 or not 0 < rotated <= head_dim:
        own.refuse("partial_rotary_factor", f"must leave an even part of the {head_dim} of a head")
    if isinstance(scaling, LongRopeScaling):
        lengths = {len(scaling.short_factors), len(scaling.long_factors)}
        if lengths != {rotated // 2}:
            raise ConfigError(
                f"{fields.source}: short_factor and long_factor must have one number for each of the "
                f"{rotated // 2} pairs of rotated dimensions."
            )
    if isinstance(scaling, DynamicScaling) and rotated <= 2:
        own.refuse("rope_scaling", "needs heads of more than 2 rotated dimensions")
    return RotarySpec(rotated, theta, scaling)


def shorter_context(tables: Iterable[RotarySpec], longest: int) -> int | None:
    """The longest context for which a model that takes `longest` tokens has other factors; None without any."""
    known = (
        it.scaling for it in tables if isinstance(it.scaling, LongRopeScaling | DynamicScaling)
    )
    lengths = (it.original_max_position_embeddings for it in known)
    return next((it for it in lengths if longest > it), None)


def rope_table(fields: Fields) -> Fields | None:
    """The table `rope_scaling`, or `rope_parameters` as new files call it; None where both are absent or empty.
    Raises ConfigError: both are there, and say different things."""
    tables = [
        table
        for name in ("rope_scaling", "rope_parameters")
        if (table := fields.table(name)) is not None and table.values
    ]
    if len(tables) == 2:
        theta = fields.values.get("rope_theta")
        old, new = ({"rope_theta": theta, **_comparable(table)} for table in tables)
        if old != new:
            fields.refuse("rope_scaling", "must say what rope_parameters says, or be absent")
    return tables[-1] if tables else None


def _comparable(table: Fields) -> dict[str, object]:
    """Values of a table that are not null, by their new names."""
    values = {name: value for name, value in table.values.items() if value is not None}
    kind = values.pop("type", "default")
    return {"rope_type": kind, **values}


def rope_by_layer(fields: Fields) -> dict[str, object]:
    """Tables of each kind of layers, of a file that has bases and parts of heads layer by layer (Step 3.5).

    Layers that see all have the scaling of the file. Nothing of a file that has one base and one part of heads."""
    is_list = isinstance(fields.values.get("rope_theta"), list)
    has_parts = fields.values.get("partial_rotary_factors") is not None
    if not is_list and (not has_parts or fields.values.get("rope_parameters") is not None):
        return {}
    kinds = fields.texts("layer_types")
    one = [1.0] * len(kinds)
    parts = fields.amounts("partial_rotary_factors") if has_parts else one
    if is_list:
        thetas = fields.amounts("rope_theta")
    else:
        thetas = [fields.number("rope_theta", 10_000.0)] * len(kinds)
    for name, numbers in (("rope_theta", thetas), ("partial_rotary_factors", parts)):
        if len(numbers) != len(kinds):
            fields.refuse(name, f"must be a list of {len(kinds)} numbers")
    found: dict[str, dict[str, object]] = {}
    for kind, theta, part in zip(kinds, thetas, parts, strict=True):
        own = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
        if found.setdefault(kind, own) != own:
            fields.refuse("rope_theta", "must be the same in all layers of a kind")
    scaling = fields.table("rope_scaling")
    if scaling is not None and "full_attention" in found:
        fields.require("yarn_only_types", ["full_attention"])
        found["full_attention"] |= scaling.values
    return {"rope_parameters": found, "rope_theta": None, "rope_scaling": None}


def rope_of_kind(fields: Fields, kind: str) -> Fields | None:
    """Fields with what a file says of layers of one kind in its table; None if it is silent on them."""
    rope = rope_table(fields)
    own = None if rope is None else rope.table(kind)
    if own is None:
        return None
    return fields.updated({"rope_parameters": own.values, "rope_scaling": None})


def _scaling_and_theta(fields: Fields) -> tuple[RopeScaling | None, float]:
    rope = rope_table(fields)
    theta = fields.number("rope_theta", 10_000.0)
    if rope is None:
        return None, theta
    theta = rope.number("rope_theta", theta)
    name = "rope_type" if rope.values.get("rope_type") is not None else "type"
    kind = rope.text(name, "default")
    if kind in ("default", "mrope"):
        # Of text, all three positions of multimodal embeddings (Qwen2-VL) are the same.
        return None, theta
    if kind == "dynamic":
        return _dynamic_scaling(rope, fields, theta)
    if kind == "proportional":
        return ProportionalScaling(rope.number("factor", 1.0), 0), theta
    if kind == "linear":
        return LinearScaling(rope.number("factor")), theta
    if kind == "ntk":
        rope.require("mixed_b", None)
        return NtkScaling(rope.number("factor")), theta
    if kind == "llama3":
        return _llama3_scaling(rope), theta
    if kind in ("longrope", "su"):
        return _longrope_scaling(rope, fields), theta
    if kind not in ("yarn", "deepseek_yarn"):
        kinds = "default, dynamic, linear, ntk, llama3, yarn, deepseek_yarn, longrope, proportional"
        rope.refuse(name, f"must be one of {kinds}")
    if theta <= 1:
        own = rope if rope.values.get("rope_theta") is not None else fields
        own.refuse("rope_theta", "must be above 1 where frequencies are scaled by YaRN")
    return _yarn_scaling(rope, fields, is_deepseek=kind == "deepseek_yarn"), theta


def longest_sequence(fields: Fields, scaling: RopeScaling | None) -> int:
    """Tokens of the longest sequence: linear scaling and YaRN lengthen the file's context, as in vLLM."""
    length = fields.positive("max_position_embeddings")
    factor = 1.0
    if isinstance(scaling, LinearScaling | DynamicScaling):
        factor = scaling.factor
    if isinstance(scaling, YarnScaling):
        length, factor = scaling.original_max_position_embeddings, scaling.factor
    if length > _LONGEST / factor:
        fields.refuse(
            "max_position_embeddings",
            f"and the factor of its scaling must leave at most {_LONGEST}",
        )
    return int(length * factor)


def _dynamic_scaling(
    rope: Fields, fields: Fields, theta: float
) -> tuple[DynamicScaling | None, float]:
    """The scaling and the base; a number `alpha` says once for all what the base becomes (Hunyuan)."""
    if rope.values.get("alpha"):
        rope.require("factor", 1.0)
        dim, alpha = _rotated_dimensions(rope, fields), rope.number("alpha")
        if alpha > _MOST_ALPHA:
            rope.refuse("alpha", f"must be at most {_MOST_ALPHA:.0f}")
        return None, theta * alpha ** (dim / (dim - 2))
    longest = fields.positive("max_position_embeddings")
    return DynamicScaling(rope.number("factor"), longest), theta


def _rotated_dimensions(rope: Fields, fields: Fields) -> int:
    """Dimensions of a head. Raises ConfigError: there are two, whose base cannot change."""
    usual = fields.positive("hidden_size") // fields.positive("num_attention_heads")
    dim = fields.positive("head_dim", max(usual, 1))
    if dim <= 2:
        rope.refuse("alpha", "needs heads of more than 2 dimensions")
    return dim


def _llama3_scaling(rope: Fields) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:
        rope.refuse("high_freq_factor", f"must be at least low_freq_factor ({low})")
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.positive("original_max_position_embeddings"),
    )


def _longrope_scaling(rope: Fields, fields: Fields) -> LongRopeScaling:
    longest, key = fields.positive("max_position_embeddings"), "original_max_position_embeddings"
    original = rope.positive(key, fields.positive(key, longest))
    if original < 2:
        own = rope if rope.values.get(key) is not None else fields
        own.refuse(key, "must be at least 2")
    factor = rope.optional_number("factor") or longest / original
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale = rope.optional_number("attention_factor") or scale
    return LongRopeScaling(
        short_factors=tuple(map(float, rope.amounts("short_factor"))),
        long_factors=tuple(map(float, rope.amounts("long_factor"))),
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("long_mscale") or scale,
        short_attention_factor=rope.optional_number("short_mscale") or scale,
    )


def _yarn_scaling(rope: Fields, fields: Fields, *, is_deepseek: bool) -> YarnScaling:
    """YaRN; DeepSeek's takes an absent `mscale` for 1, and scales by it where `mscale_all_dim` is absent (SGLang).

    Nothing but frequencies is scaled where `apply_yarn_scaling` is false (vLLM)."""
    attention_factor = rope.optional_number("attention_factor")
    mscale, of_all = (rope.optional_number(name) for name in ("mscale", "mscale_all_dim"))
    if is_deepseek:
        mscale, of_all = mscale or 1.0, of_all or 0.0
    if not rope.flag("apply_yarn_scaling", True):
        rope.require("attention_factor", 1)
        attention_factor, mscale, of_all = 1.0, None, None
    return YarnScaling(
        factor=rope.number("factor"),
        original_max_position_embeddings=rope.positive(
            "original_max_position_embeddings", fields.positive("max_position_embeddings")
        ),
        attention_factor=attention_factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=mscale,
        mscale_all_dim=of_all,
        truncate=rope.flag("truncate", True),
    )
