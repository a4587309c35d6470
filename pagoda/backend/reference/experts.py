# SPDX-License-Identifier: Apache-2.0
"""Experts in plain PyTorch: which of them a token goes through, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pagoda.backend.base import ExpertActivation, Experts
from pagoda.backend.reference.linear import Linear, linear
from pagoda.backend.reference.rows import (
    gelu_and_mul,
    relu,
    sigmoid,
    silu,
    silu_and_mul,
    swiglu_oai,
)
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.parallel.collectives import Collectives


def experts(x: Tensor, logits: Tensor, experts: Experts[Linear]) -> Tensor:
    routing = experts.routing
    chosen, weights = routed(logits, routing, experts.correction)
    experts.counts.add_(torch.bincount(chosen.flatten(), minlength=routing.num_experts))
    total = torch.zeros(x.shape)
    for index, (gate, up, down) in enumerate(
        zip(experts.gate, experts.up, experts.down, strict=True)
    ):
        tokens, places = (chosen == experts.first + index).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        own, weight = x[tokens], weights[tokens, places, None]
        if routing.weighs_inputs:
            own = own * weight
        inner = _activated(linear(own, gate), linear(own, up), experts.activation)
        out = linear(inner, down)
        total[tokens] += out if routing.weighs_inputs else out * weight
    return total


def dispatched_experts(
    x: Tensor,
    logits: Tensor,
    counts: Tensor,
    held: Experts[Linear],
    group: Collectives,
    *,
    first_experts: tuple[int, ...],
) -> Tensor:
    if not counts.any():
        return x
    routing, total = held.routing, torch.zeros(x.shape)
    chosen, _ = routed(logits, routing, held.correction)
    held.counts.add_(torch.bincount(chosen.flatten(), minlength=routing.num_experts))
    owners = torch.bucketize(chosen, torch.tensor(first_experts), right=True) - 1
    tokens = [(owners == rank).any(1).nonzero()[:, 0] for rank in range(group.size)]
    sent = group.all_gather(torch.tensor([len(rows) for rows in tokens])).tolist()
    rows = torch.cat(tokens)
    found = group.all_to_all(torch.cat((x[rows], logits[rows]), dim=1), sent)
    uncounted = replace(held, counts=torch.zeros_like(held.counts))
    rows_here, logits_here = found.split_with_sizes([x.shape[1], logits.shape[1]], dim=1)
    given = experts(rows_here, logits_here, uncounted)
    back = group.all_to_all(given, [list(row) for row in zip(*sent, strict=True)])
    for part, of_rank in zip(back.split_with_sizes(sent[group.rank]), tokens, strict=True):
        total[of_rank] += part
    return total


def _activated(gate: Tensor, up: Tensor, activation: ExpertActivation) -> Tensor:
    if activation.kind == "relu":
        return relu(gate) * up
    if activation.kind == "clamped_silu":
        most = activation.limit
        return silu(gate).clamp(max=most) * up.clamp(-most, most)
    if activation.kind != "swiglu_oai":
        joined = silu_and_mul if activation.kind == "silu" else gelu_and_mul
        return joined(torch.cat((gate, up), dim=1))
    pairs = torch.stack((gate, up), dim=2).flatten(1)
    return swiglu_oai(pairs, alpha=activation.alpha, limit=activation.limit)


def routed(
    logits: Tensor, routing: ExpertRouting, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Numbers of each token's experts, ascending, and their weights: two of [n, experts_per_token]."""
    scores = _SCORES[routing.scores](logits)
    # By logits where they decide: two that differ may have the same score.
    values = logits
    if correction is not None:
        values = scores + correction
    elif routing.num_groups > 1 and routing.group_score == "best_two":
        values = scores
    if routing.num_groups > 1:
        values = values.masked_fill(~_in_chosen_groups(values, routing), -torch.inf)
    ranked = values.sort(dim=1, descending=True, stable=True).indices
    chosen = ranked[:, : routing.experts_per_token].sort(dim=1).values
    weights = scores.gather(1, chosen)
    if routing.renormalize:  # sigmoids may all be 0
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return chosen, weights * routing.scaling_factor


_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=1),
    "sigmoid": sigmoid,
    "given": lambda weights: weights,
}


def _in_chosen_groups(values: Tensor, routing: ExpertRouting) -> Tensor:
    """[n, num_experts] bool."""
    size = routing.num_experts // routing.num_groups
    groups = values.view(len(values), routing.num_groups, size)
    best = groups.sort(dim=2, descending=True).values[
        :, :, : 1 + (routing.group_score == "best_two")
    ]
    ranked = best.sum(2).sort(dim=1, descending=True, stable=True).indices
    chosen = torch.zeros(groups.shape[:2], dtype=torch.bool)
    chosen.scatter_(1, ranked[:, : routing.groups_per_token], value=True)
    return chosen.repeat_interleave(size, dim=1)


OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "experts": experts,
    "dispatched_experts": dispatched_experts,
}
"""Operations by name."""
