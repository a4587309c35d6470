# SPDX-License-Identifier: Apache-2.0
"""Operations of layers that keep one state of all tokens so far, recorded by a `GraphBuilder`.

States are carried on token by token: a result does not depend on how a sequence was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder

if TYPE_CHECKING:
    from pagoda.backend.base import StateCache


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
    result is q S / sqrt(key_dim). Raises ValueError: shapes do not fit.
    """
    heads = cache.units
    value_dim, rest = divmod(qkv.width - 2 * key_heads * key_dim, heads)
    if value_dim <= 0 or rest or cache.floats != key_dim * value_dim or heads % key_heads:
        raise ValueError(
            f"Rows of {qkv.width} are not queries and keys of {key_heads} heads of {key_dim} and values of "
            f"{heads} heads with states of {cache.floats}."
        )
    if gates.width != 2 * heads or (len(decay), len(dt_bias)) != (heads, heads):
        raise ValueError(
            f"Gates of {gates.width}, decays and biases are not those of {heads} heads."
        )
    return ops.record(
        "gated_delta",
        [qkv, gates, metadata],
        [cache, decay, dt_bias],
        {"key_heads": key_heads, "key_dim": key_dim},
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
