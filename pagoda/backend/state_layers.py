# SPDX-License-Identifier: Apache-2.0
"""Operations of layers that keep one state of all tokens so far, recorded by a `GraphBuilder`.

States are carried on token by token: a result does not depend on how a sequence was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, NamedTuple

from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder

if TYPE_CHECKING:
    from pagoda.backend.base import StateCache


class Columns(NamedTuple):
    """Neighbouring columns of rows."""

    rows: Value
    first: int = 0


def short_conv(
    ops: GraphBuilder,
    x: Value,
    metadata: Value,
    cache: StateCache,
    weight: Sized,
    bias: Sized | None = None,
    *,
    gated: bool = False,
    silu: bool = False,
) -> Value:
    """Causal convolution of each channel of x [n, channels] over a token and those before it: [n, channels].

    The weight [width, channels] float32 has that of the oldest token first; the bias [channels] is added. States
    are the last `width - 1` inputs of each channel. With `gated`, x [n, 3 channels] is (b, c, x), and the result
    c conv(b x) (LFM2); with `silu`, its SiLU is taken. Raises ValueError: shapes do not fit.
    """
    channels, inputs = cache.units, cache.units * (3 if gated else 1)
    if x.width != inputs:
        raise ValueError(f"Rows of {x.width} do not fit a convolution of {inputs} inputs.")
    if cache.floats != len(weight) - 1:
        raise ValueError(
            f"States of {cache.floats} inputs do not fit a convolution of {len(weight)}."
        )
    if bias is not None and len(bias) != channels:
        raise ValueError(f"A bias of {len(bias)} is not that of {channels} channels.")
    weights = [cache, weight] if bias is None else [cache, weight, bias]
    attributes = {"gated": float(gated), "silu": float(silu)}
    return ops.record("short_conv", [x, metadata], weights, attributes, channels)


def gated_delta(
    ops: GraphBuilder,
    qkv: Value,
    gates: Value,
    metadata: Value,
    cache: StateCache,
    decay: Sized,
    dt_bias: Sized,
    *,
    key_heads: int,
    key_dim: int,
) -> Value:
    """Gated delta rule (Yang et al. 2024, arXiv 2412.06464), token by token: [n, heads value_dim].

    Rows of qkv have queries and keys of `key_heads` heads, then values of as many heads as the cache has units, of
    which neighbours have a query and key in common. Gates [n, 2 heads] are b of all heads, then a. Of every head,
    with q and k over their lengths (the root of the sum of squares plus 1e-6), a state S [key_dim, value_dim]
    becomes g S + k beta (v - g k S), where beta is the sigmoid of b and g is exp(decay softplus(a + dt_bias)); the
    result is q S / sqrt(key_dim). With gates [n, heads + heads key_dim] and a bias of as many elements, a of every
    head has one for each row of S (Kimi Team 2025, arXiv 2510.26692). Raises ValueError: shapes do not fit.
    """
    heads = cache.units
    value_dim, rest = divmod(qkv.width - 2 * key_heads * key_dim, heads)
    if value_dim <= 0 or rest or cache.floats != key_dim * value_dim or heads % key_heads:
        raise ValueError(
            f"Rows of {qkv.width} are not queries and keys of {key_heads} heads of {key_dim} and values of "
            f"{heads} heads with states of {cache.floats}."
        )
    by_channel = len(dt_bias) != heads
    channels = key_dim if by_channel else 1
    sizes = gates.width, len(decay), len(dt_bias)
    if sizes != (heads * (1 + channels), heads, heads * channels):
        raise ValueError(
            f"Gates of {gates.width}, decays and biases are not those of {heads} heads."
        )
    return ops.record(
        "gated_delta",
        [qkv, gates, metadata],
        [cache, decay, dt_bias],
        {"key_heads": key_heads, "key_dim": key_dim, "by_channel": by_channel},
        heads * value_dim,
    )


def gated_head_norm(ops: GraphBuilder, x: Value, gate: Value, weight: Sized, eps: float) -> Value:
    """RMS norm of every head of x [n, heads d], by a weight [d] float32, times the SiLU of a gate [n, heads d].

    Raises ValueError: shapes do not fit.
    """
    if gate.width != x.width or x.width % len(weight):
        raise ValueError(f"Rows of {x.width} and {gate.width} are not heads of {len(weight)}.")
    attributes = {"head_dim": len(weight), "eps": eps}
    return ops.record("gated_head_norm", [x, gate], [weight], attributes, x.width)


def selective_scan(
    ops: GraphBuilder,
    x: Value,
    b: Columns,
    c: Columns,
    dt: Value,
    metadata: Value,
    cache: StateCache,
    decay: Sized,
    dt_bias: Sized,
    skip: Sized,
    *,
    groups: int,
    head_dim: int,
    by_element: bool = False,
    dt_limit: tuple[float, float],
) -> Value:
    """Selective state spaces (Gu and Dao 2023; Dao and Gu 2024), token by token: [n, heads head_dim].

    The first columns of x are values of as many heads as the cache has units, b and c [n, groups state_dim] are
    of groups of neighbouring heads, and dt is [n, heads]. Of every head a state S [state_dim, head_dim] becomes
    exp(A s) S + b (s x), where s is softplus(dt + dt_bias) within `dt_limit` and A is the head's `decay` [heads]
    or, with `by_element`, those of the state's rows, [state_dim, heads]; the result is c S + skip x. Weights are
    float32, dt_bias and skip [heads]. Raises ValueError: shapes do not fit.
    """
    heads, state_dim = cache.units, cache.floats // head_dim
    fits = cache.floats == state_dim * head_dim and heads % groups == 0 and dt.width == heads
    spans = ((Columns(x), heads * head_dim), (b, groups * state_dim), (c, groups * state_dim))
    if not fits or any(it.first + count > it.rows.width for it, count in spans):
        raise ValueError(
            f"Rows of {x.width}, {b.rows.width}, {c.rows.width} and {dt.width} do not fit {heads} heads of "
            f"{head_dim} in {groups} groups with states of {cache.floats}."
        )
    if {len(dt_bias), len(skip)} != {heads} or len(decay) != (state_dim if by_element else heads):
        raise ValueError(f"Decays, biases and factors are not those of {heads} heads.")
    attributes = {
        "groups": groups,
        "state_dim": state_dim,
        "b_first": b.first,
        "c_first": c.first,
        "by_element": float(by_element),
        "dt_min": dt_limit[0],
        "dt_max": dt_limit[1],
    }
    inputs, weights = [x, b.rows, c.rows, dt, metadata], [cache, decay, dt_bias, skip]
    return ops.record("selective_scan", inputs, weights, attributes, heads * head_dim)


def rms_norm_groups(ops: GraphBuilder, x: Value, weight: Sized, groups: int, eps: float) -> Value:
    """RMS norm of each of some groups of neighbouring columns of x [n, d], by a weight [d] float32: [n, d].

    Raises ValueError: shapes do not fit.
    """
    if len(weight) != x.width or x.width % groups:
        raise ValueError(f"{groups} groups of {len(weight)} weights do not fit rows of {x.width}.")
    attributes = {"group_size": x.width // groups, "eps": eps}
    return ops.record("rms_norm_groups", [x], [weight], attributes, x.width)
