# SPDX-License-Identifier: Apache-2.0
"""Operations on rows by themselves, in plain PyTorch: sums, norms and activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def select_rows(x: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if x is None else x[rows]


def add(x: Tensor, delta: Tensor) -> Tensor:
    return x + delta


def scale(x: Tensor, *, factor: float) -> Tensor:
    return x * factor


def softcap(x: Tensor, *, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    # F.silu takes another path for the last few elements of a tensor than for the rest.
    return gate / (1 + torch.exp(-gate)) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def gelu_erf_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate) * up


def swiglu_oai(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + 1)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * torch.erfc(x * -math.sqrt(0.5))


def gelu_tanh(x: Tensor) -> Tensor:
    doubled = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x / (1 + torch.exp(-doubled))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def xielu(x: Tensor, *, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    below = negative * (torch.exp(x.clamp(max=eps)) - 1 - x)
    return torch.where(x > 0, positive * x * x, below) + beta * x


def clip(x: Tensor, *, limit: float) -> Tensor:
    return x.clamp(-limit, limit)


def layer_norm_heads(
    x: Tensor, weight: Tensor, bias: Tensor, *, elements: int, head_dim: int, eps: float
) -> Tensor:
    heads = x[:, :elements].reshape(len(x), -1, head_dim)
    weights = weight.view(-1, head_dim), bias.view(-1, head_dim)
    normed = layer_norm(heads, *weights, eps=eps).flatten(1)
    return torch.cat((normed, x[:, elements:]), dim=1)


def rotated(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the pairs (i, i + r/2) of the first r elements of every head of x [n, heads, d]."""
    cos, sin = (part[:, None, :] for part in table)
    half = cos.shape[-1]
    left, right, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)


def rotate_heads(
    x: Tensor,
    cosines: Tensor,
    sines: Tensor,
    *,
    elements: int,
    head_dim: int,
    width: int,  # noqa: ARG001 - the table says it
) -> Tensor:
    heads = x[:, :elements].reshape(len(x), -1, head_dim)
    return torch.cat((rotated(heads, (cosines, sines)).flatten(1), x[:, elements:]), dim=1)


def columns(x: Tensor, *, first: int, count: int) -> Tensor:
    return x[:, first : first + count]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def mul(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor


def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    return x * factors


def sum_of_squares(qkv: Tensor, *, queries: int, keys: int) -> Tensor:
    parts = qkv[:, :queries], qkv[:, queries : queries + keys]
    return torch.stack([part.square().sum(1) for part in parts], dim=1)


def norm_by_squares(
    qkv: Tensor,
    squares: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    *,
    queries: int,
    keys: int,
    all_queries: int,
    all_keys: int,
    eps: float,
) -> Tensor:
    q, k, v = torch.split(qkv, [queries, keys, keys], dim=1)
    factors = torch.rsqrt(squares / torch.tensor([all_queries, all_keys]) + eps)
    return torch.cat((q * factors[:, :1] * query_norm, k * factors[:, 1:] * key_norm, v), dim=1)


OPERATIONS: Mapping[str, Callable[..., Tensor | None]] = {
    function.__name__: function
    for function in (
        select_rows,
        add,
        scale,
        softcap,
        rms_norm,
        layer_norm,
        silu_and_mul,
        gelu_and_mul,
        gelu_erf_and_mul,
        swiglu_oai,
        gelu,
        gelu_tanh,
        silu,
        relu,
        columns,
        xielu,
        clip,
        layer_norm_heads,
        rotate_heads,
        sigmoid,
        mul,
        scale_rows,
        sum_of_squares,
        norm_by_squares,
    )
}
"""Operations by name."""
