"""Scalings of rotary position embeddings, as config.json files spell them."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.checkpoints.fields import Fields


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones kept, those between blended (Llama 3.1)."""

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


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency is divided by a number of its own (how GGUF files write `Llama3Scaling`)."""

    factors: tuple[float, ...]
    """One number for each pair of dimensions."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


def parse_rope(fields: Fields) -> tuple[RopeScaling | None, float]:
    """Rotary scaling and base, spelled the old way (`rope_scaling`, `rope_theta`) or as `rope_parameters`."""
    rope = fields.table("rope_parameters") or fields.table("rope_scaling")
    theta = fields.number("rope_theta", 10_000.0)
    if rope is None:
        return None, theta
    theta = rope.number("rope_theta", theta)
    rope.require("partial_rotary_factor", 1)
    name = "rope_type" if rope.values.get("rope_type") is not None else "type"
    kind = rope.text(name, "default")
    if kind == "default":
        return None, theta
    if kind == "linear":
        return LinearScaling(rope.number("factor")), theta
    if kind == "llama3":
        return _llama3_scaling(rope), theta
    if kind != "yarn":
        rope.refuse(name, "must be one of default, linear, llama3, yarn")
    return _yarn_scaling(rope, fields), theta


def longest_sequence(fields: Fields, scaling: RopeScaling | None) -> int:
    """Tokens of the longest sequence: linear scaling and YaRN lengthen the file's context, as in vLLM."""
    length = fields.positive("max_position_embeddings")
    if isinstance(scaling, LinearScaling):
        return int(length * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return int(scaling.original_max_position_embeddings * scaling.factor)
    return length


def _llama3_scaling(rope: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.positive("original_max_position_embeddings"),
    )


def _yarn_scaling(rope: Fields, fields: Fields) -> YarnScaling:
    return YarnScaling(
        factor=rope.number("factor"),
        original_max_position_embeddings=rope.positive(
            "original_max_position_embeddings", fields.positive("max_position_embeddings")
        ),
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
