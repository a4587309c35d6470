# SPDX-License-Identifier: Apache-2.0
"""Operations of few families on rows: their formulas on all backends, and what builders refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_cases import random_tensor

from pagoda.backend import family_operations as family
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.single import compute

CLOSE = {"atol": 2e-6, "rtol": 2e-5}


def test_norms_of_some_heads(ops: Any) -> None:
    x, weight = 2 * random_tensor(41, 84, seed=1), random_tensor(48, seed=2)

    def record(graph: GraphBuilder, x: Value) -> Value:
        return family.rms_norm_heads(graph, x, weight, first=24, head_dim=12, eps=1e-5)

    heads = x[:, 24:72].double().view(41, 4, 12)
    normed = heads / (heads.square().mean(2, keepdim=True) + 1e-5).sqrt()
    found = compute(ops.backend, record, {"x": x})
    torch.testing.assert_close(found[:, 24:72], (normed.flatten(1) * weight).float(), **CLOSE)
    assert torch.equal(found[:, :24], x[:, :24])
    assert torch.equal(found[:, 72:], x[:, 72:])


def _mixed(row: list[float], jitter: float) -> list[float]:
    """Weights by the words of Liu et al. 2024, one after the other."""
    weights, left = [0.0] * len(row), set(range(len(row)))
    for _ in range(2):
        best = min(left, key=lambda i: (-row[i], i))
        near = [i for i in left if (row[best] - row[i]) / max(abs(row[i]), row[best]) <= 2 * jitter]
        shares = torch.tensor([row[i] for i in near]).double().softmax(0)
        weights[best] = shares[near.index(best)].item()
        left.remove(best)
    return weights


def test_sparse_mixing(ops: Any) -> None:
    logits = 0.4 * random_tensor(41, 16, seed=3) + 1
    expected = torch.tensor([_mixed(row, 0.1) for row in logits.tolist()])
    found = compute(
        ops.backend, lambda graph, x: family.sparse_mixing(graph, x, 0.1), {"x": logits}
    )
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (found > 0).sum(1).tolist() == [2] * 41


@pytest.mark.parametrize("kept", [9, 6])
@pytest.mark.parametrize("corrected", [False, True])
def test_weights_of_experts(ops: Any, corrected: bool, kept: int) -> None:
    logits, factors = random_tensor(41, 9, seed=4), random_tensor(9, seed=5)
    correction = random_tensor(9, seed=6) if corrected else None

    def record(graph: GraphBuilder, x: Value) -> Value:
        sizes = {"per_token": 3, "renormalize": not corrected, "kept": kept}
        return family.expert_weights(graph, x, factors, correction, **sizes)

    shares = logits.double().softmax(1)
    chosen = (shares if correction is None else shares + correction).topk(3).indices
    weights = torch.zeros_like(shares).scatter(1, chosen, shares.gather(1, chosen))
    if not corrected:
        weights /= weights.sum(1, keepdim=True)
    weights = weights * factors
    if kept < 9:
        weights = torch.cat((weights[:, :kept], weights[:, kept:].sum(1, keepdim=True)), 1)
    found = compute(ops.backend, record, {"x": logits})
    torch.testing.assert_close(found, weights.float(), **CLOSE)


def test_numbers_far_above_their_mean(ops: Any) -> None:
    x = random_tensor(41, 130, seed=7) + 3
    wide = x.double()
    limit = wide.mean(1, keepdim=True) + 1.6 * wide.std(1, correction=0, keepdim=True)
    found = compute(ops.backend, lambda graph, x: family.above_deviations(graph, x, 1.6), {"x": x})
    torch.testing.assert_close(found, (wide - limit).relu().float(), **CLOSE)


def test_streams(ops: Any) -> None:
    """Three streams of 10 elements are opened, predicted and corrected."""
    x, other = random_tensor(41, 10, seed=8), 5 * random_tensor(41, 20, seed=9)
    by, to = random_tensor(41, 9, seed=10), random_tensor(41, 3, seed=11)

    def record(graph: GraphBuilder, **given: Value) -> list[Value]:
        streams = family.join_columns(graph, given["x"], given["other"])
        mixed = family.mix_streams(graph, streams, given["by"], 3)
        corrected = family.correct_streams(graph, mixed, given["x"], given["to"], 3)
        like = family.match_magnitude(graph, given["x"], given["like"], 1e-5)
        return [corrected, like]

    like = random_tensor(41, 10, seed=12)
    tensors = {"x": x, "other": other, "by": by, "to": to, "like": like}
    corrected, matched = compute(ops.backend, record, tensors)
    apart = torch.cat((x, other), 1).double().view(41, 3, 10)
    mixed = apart + torch.einsum("nij,njd->nid", by.double().view(41, 3, 3), apart)
    added = torch.einsum("ni,nd->nid", to.double() + 1, x.double() - mixed[:, 0])
    torch.testing.assert_close(corrected, (mixed + added).flatten(1).float(), atol=1e-5, rtol=1e-5)
    sizes = (like.double().square().mean(1) / x.double().square().mean(1)).sqrt()
    torch.testing.assert_close(matched, (x * sizes[:, None]).float(), **CLOSE)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda g, x: family.sparse_mixing(g, x, 0.1), "Two of one expert"),
        (lambda g, x: family.mix_streams(g, x, x, 3), "Rows of 1 are not of 9"),
        (
            lambda g, x: family.rms_norm_heads(g, x, [1.0], first=1, head_dim=1, eps=0.1),
            "do not fit rows of 1",
        ),
        (
            lambda g, x: family.expert_weights(g, x, [1.0], per_token=2, renormalize=True, kept=1),
            "are no choice",
        ),
    ],
)
def test_shapes_that_do_not_fit(ops: Any, record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute(ops.backend, record, {"x": torch.ones(2, 1)})
