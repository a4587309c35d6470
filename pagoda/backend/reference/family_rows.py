# SPDX-License-Identifier: Apache-2.0
"""Operations of one or two families of decoders on rows, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pagoda.backend.reference.rows import rms_norm


def rms_norm_heads(
    x: Tensor, weight: Tensor, *, first: int, elements: int, head_dim: int, eps: float
) -> Tensor:
    heads = x[:, first : first + elements].reshape(len(x), -1, head_dim)
    normed = rms_norm(heads, weight.view(-1, head_dim), eps=eps).flatten(1)
    return torch.cat((x[:, :first], normed, x[:, first + elements :]), dim=1)


def sparse_mixing(logits: Tensor, *, jitter: float) -> Tensor:
    weights, left = torch.zeros_like(logits), logits
    for _ in range(2):
        top = left.max(1, keepdim=True)
        size = torch.maximum(logits.abs(), top.values)
        near = ~((top.values - logits) / size > 2 * jitter)
        shares = left.masked_fill(~near, -torch.inf).softmax(1)
        weights.scatter_(1, top.indices, shares.gather(1, top.indices))
        left = left.scatter(1, top.indices, -torch.inf)
    return weights


def expert_weights(
    logits: Tensor,
    factors: Tensor,
    correction: Tensor | None = None,
    *,
    per_token: int,
    renormalize: bool,
    corrected: bool,  # noqa: ARG001 - the correction says it
    kept: int,
) -> Tensor:
    scores = logits.softmax(1)
    values = logits if correction is None else scores + correction
    chosen = values.sort(dim=1, descending=True, stable=True).indices[:, :per_token]
    shares = scores.gather(1, chosen)
    if renormalize:
        shares = shares / shares.sum(1, keepdim=True)
    weights = torch.zeros_like(scores).scatter_(1, chosen, shares) * factors
    if kept == logits.shape[1]:
        return weights
    return torch.cat((weights[:, :kept], weights[:, kept:].sum(1, keepdim=True)), dim=1)


def above_deviations(x: Tensor, *, deviations: float) -> Tensor:
    deviation, mean = torch.std_mean(x, dim=1, keepdim=True, correction=0)
    return (x - mean - deviations * deviation).clamp(min=0)


def match_magnitude(x: Tensor, like: Tensor, *, least: float) -> Tensor:
    wanted, own = (it.square().mean(1, keepdim=True) for it in (like, x))
    return x * (wanted.sqrt() / own.clamp(min=least).sqrt())


def scale_heads(x: Tensor, factors: Tensor, *, head_dim: int) -> Tensor:
    return x * factors.repeat_interleave(head_dim, dim=1)


def join_columns(x: Tensor, beside: Tensor) -> Tensor:
    return torch.cat((x, beside), dim=1)


def mix_streams(streams: Tensor, coefficients: Tensor, *, count: int) -> Tensor:
    apart = streams.view(len(streams), count, -1)
    return (apart + coefficients.view(-1, count, count) @ apart).flatten(1)


def correct_streams(
    streams: Tensor, activated: Tensor, coefficients: Tensor, *, count: int
) -> Tensor:
    apart = streams.view(len(streams), count, -1)
    lacking = activated - apart[:, 0]
    return (apart + lacking[:, None] * (coefficients + 1)[:, :, None]).flatten(1)


OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        rms_norm_heads,
        sparse_mixing,
        expert_weights,
        above_deviations,
        match_magnitude,
        scale_heads,
        join_columns,
        mix_streams,
        correct_streams,
    )
}
"""Operations by name."""
