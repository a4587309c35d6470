# SPDX-License-Identifier: Apache-2.0
"""Frequencies of the rotary position embedding, with the scalings that lengthen a model's context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagoda.checkpoints.rope import (
    DynamicScaling,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    ProportionalScaling,
    RotarySpec,
    YarnScaling,
)


def rotary_frequencies(rotary: RotarySpec, max_length: int) -> tuple[Tensor, float]:
    """Angle per position of each rotated pair of dimensions, [dim / 2] float32, and scale of cosines and sines.

    No sequence is longer than `max_length`. The base form is Su et al. 2021.
    """
    exponents = torch.arange(0, rotary.dim, 2).float() / rotary.dim
    scaling, theta = rotary.scaling, rotary.theta
    if isinstance(scaling, DynamicScaling):
        theta, scaling = theta * scaling.base_factor(max_length, rotary.dim), None
    wavelengths = theta**exponents
    if scaling is None:
        return 1.0 / wavelengths, 1.0
    if isinstance(scaling, LinearScaling):
        return 1.0 / wavelengths / scaling.factor, 1.0
    if isinstance(scaling, NtkScaling):
        grown = (rotary.theta * scaling.factor) ** exponents
        return 1.0 / grown / scaling.factor ** (2 / rotary.dim), 1.0
    if isinstance(scaling, ProportionalScaling):
        kept = torch.arange(len(wavelengths)) < scaling.pairs
        return kept / wavelengths / scaling.factor, 1.0
    if isinstance(scaling, FrequencyFactors):
        return 1.0 / wavelengths / torch.tensor(scaling.factors), 1.0
    if isinstance(scaling, LongRopeScaling):
        factors = torch.tensor(scaling.factors(max_length))
        return 1.0 / (factors * wavelengths), scaling.scale(max_length)
    if isinstance(scaling, Llama3Scaling):
        return _llama3(1.0 / wavelengths, scaling), 1.0
    return _yarn(wavelengths, rotary.theta, scaling), _yarn_scale(scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Blends by how often a wave fits into the original context (Llama 3.1)."""
    waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    width = max(high - low, torch.finfo(waves.dtype).tiny)
    kept = ((waves - low) / width).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(wavelengths: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Interpolates the dimensions that turn seldom, keeps those that turn often (Peng et al. 2023, part 3.2)."""
    head_dim = 2 * wavelengths.shape[0]

    def dimension_of(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    return interpolated / (scaling.factor * wavelengths) + (1 - interpolated) / wavelengths


def _yarn_scale(scaling: YarnScaling) -> float:
    """Factor of cosines and sines, the paper's temperature of attention."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return scaling.temperature(scaling.mscale) / scaling.temperature(scaling.mscale_all_dim)
    return scaling.temperature(1.0)
