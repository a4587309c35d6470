# SPDX-License-Identifier: Apache-2.0
"""Experts follow the formula, in the reference and every instruction set, with the same bits in any company."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import gguf
import pytest
import torch
from cpu_cases import (
    DTYPES,
    REFERENCE,
    SETS,
    TOLERANCE,
    backend_of,
    dtypes,
    kernels,
    needs_kernels,
    quantized,
    random_tensor,
    seeds,
    sets,
    threads,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from single_operations import SingleOperations, one_by_one
from torch import Tensor

from pagoda.backend.base import ExpertActivation, Experts, StepInput
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.graph import Graph
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.weights import DenseWeight, LinearWeight, dequantize
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.gguf.reader import BLOCK_TYPES
from pagoda.model.ggml_blocks import linear_weight
from pagoda.parallel.collectives import Collectives

FORMATS = ("dense", "int8", "int4", "mixed", "ordered", "Q4_1", "Q5_0")


def _quantized(kind: str, values: Tensor) -> LinearWeight:
    if kind.startswith("Q"):
        blocks = gguf.quantize(values.float().numpy(), gguf.GGMLQuantizationType[kind])
        block = next(block for block in BLOCK_TYPES.values() if block.name == kind)
        return linear_weight(torch.from_numpy(blocks), block, values.dtype)
    if kind != "ordered":
        return quantized(REFERENCE, kind, values)
    # int4 with its inputs in another order (GPTQ's act-order).
    order = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(1))
    return replace(REFERENCE.quantize_int4(values[:, order].contiguous(), 32), act_order=order)


SILU = ExpertActivation()


class _Weights:
    """Random experts, of which each backend makes its own."""

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype,
        *,
        routing: ExpertRouting,
        hidden: int,
        inner: int,
        seed: int = 0,
        activation: ExpertActivation = SILU,
        has_biases: bool = False,
        is_corrected: bool = False,
    ) -> None:
        self.routing, self.dtype, self.activation = routing, dtype, activation
        self.biases: list[list[Tensor | None]] = [
            [
                random_tensor(size, seed=seed + e + place) if has_biases else None
                for e in range(routing.num_experts)
            ]
            for place, size in enumerate((inner, inner, hidden))
        ]
        self.correction = random_tensor(routing.num_experts, seed=5) if is_corrected else None
        self.maps: list[list[LinearWeight]] = [[], [], []]
        for expert in range(routing.num_experts):
            for place, (outputs, inputs) in enumerate(
                ((inner, hidden), (inner, hidden), (hidden, inner))
            ):
                values = random_tensor(outputs, inputs, seed=seed + 9 * expert + place, dtype=dtype)
                # Of mixed ones, those of one expert differ as well.
                name = ("dense", "int8", "int4")[(expert + place) % 3] if kind == "mixed" else kind
                self.maps[place].append(_quantized(name, values * inputs**-0.5))

    def prepared(self, ops: Any, first: int = 0, end: int | None = None) -> Experts[Any]:
        gate, up, down = (
            tuple(
                ops.prepare_linear([weight], bias, self.dtype)
                for weight, bias in zip(weights[first:end], biases[first:end], strict=True)
            )
            for weights, biases in zip(self.maps, self.biases, strict=True)
        )
        counts = torch.zeros(self.routing.num_experts, dtype=torch.int64)
        return Experts(
            self.routing, first, gate, up, down, counts, self.activation, self.correction
        )

    def formula(self, x: Tensor, logits: Tensor) -> Tensor:
        """Token by token, in float64, with inputs that are not rounded."""
        routing = self.routing
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, row in enumerate(x.double()):
            own = logits[token].double()
            scores = own.softmax(0) if routing.scores == "softmax" else own.sigmoid()
            chosen = self._chosen(scores)
            total = sum(float(scores[e]) for e in chosen) if routing.renormalize else 1.0
            for e in chosen:
                weight = scores[e] / total * routing.scaling_factor
                if routing.weighs_inputs:
                    out[token] += self._expert(e, row * weight)
                else:
                    out[token] += weight * self._expert(e, row)
        return out

    def _chosen(self, scores: Tensor) -> list[int]:
        routing, values = self.routing, scores.tolist()
        if self.correction is not None:
            values = (scores + self.correction).tolist()
        size, best = routing.num_experts // routing.num_groups, 1 + (routing.group_score != "best")
        groups = [range(g * size, (g + 1) * size) for g in range(routing.num_groups)]
        groups.sort(key=lambda group: -sum(sorted(values[e] for e in group)[-best:]))
        within = [e for group in groups[: routing.groups_per_token] for e in group]
        return sorted(within, key=lambda e: (-values[e], e))[: routing.experts_per_token]

    def _expert(self, number: int, row: Tensor) -> Tensor:
        def mapped(place: int, row: Tensor) -> Tensor:
            out = dequantize(self.maps[place][number]).double() @ row
            bias = self.biases[place][number]
            return out if bias is None else out + bias

        gate, up, kind = mapped(0, row), mapped(1, row), self.activation.kind
        if kind == "silu":
            return mapped(2, torch.nn.functional.silu(gate) * up)
        limit = self.activation.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return mapped(2, (up + 1) * gate * torch.sigmoid(self.activation.alpha * gate))


def _close(actual: Tensor, expected: Tensor, kind: str, dtype: torch.dtype) -> None:
    # Quantized maps round their inputs to 8 bits.
    tolerance = 4 * TOLERANCE[dtype] if kind == "dense" else 4e-2
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=tolerance * float(expected.abs().max()), rtol=0.0
    )


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_reference_follows_the_formula(kind: str, renormalize: bool) -> None:
    weights = _Weights(
        kind, torch.float32, routing=ExpertRouting(6, 2, renormalize), hidden=64, inner=32
    )
    x, logits = (random_tensor(20, n, seed=n, dtype=torch.float32) for n in (64, 6))
    experts = weights.prepared(REFERENCE)
    _close(REFERENCE.experts(x, logits, experts), weights.formula(x, logits), kind, torch.float32)
    assert experts.counts.sum() == 2 * 20


FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "routing": ExpertRouting(16, 4, True, "sigmoid", 4, 2, "best_two", 2.5),
        "is_corrected": True,
    },
    "deepseek_v2": {"routing": ExpertRouting(16, 4, False, "softmax", 4, 2, "best", 16.0)},
    "glm4_moe": {"routing": ExpertRouting(8, 3, True, "sigmoid"), "is_corrected": True},
    "llama4": {"routing": ExpertRouting(6, 1, False, "sigmoid", weighs_inputs=True)},
    "gpt_oss": {
        "routing": ExpertRouting(8, 3, True),
        "activation": ExpertActivation("swiglu_oai", 1.702, 1.5),
        "has_biases": True,
    },
    "ernie4_5_moe": {"routing": ExpertRouting(9, 3, True), "is_corrected": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["dense", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rules_of_families(ops: Any, family: str, kind: str, dtype: torch.dtype) -> None:
    weights = _Weights(kind, dtype, hidden=96, inner=160, **FAMILIES[family])
    num_experts = weights.routing.num_experts
    x, logits = (random_tensor(40, n, seed=n) for n in (96, num_experts))
    x = x.to(dtype).float()
    experts = weights.prepared(ops)
    whole = ops.experts(x, logits, experts)
    _close(whole, weights.formula(x, logits), kind, dtype)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        for start, size in ((0, 1), (13, 7), (5, 24)):
            part = slice(start, start + size)
            assert torch.equal(ops.experts(x[part], logits[part], experts), whole[part])
    torch.set_num_threads(2)
    half = num_experts // 2
    shares = [weights.prepared(ops, 0, half), weights.prepared(ops, half)]
    total = sum(ops.experts(x, logits, share) for share in shares)
    tolerance = 1e-5 * float(whole.abs().max())
    torch.testing.assert_close(total, whole, atol=tolerance, rtol=0.0)


def test_scores_that_are_all_zero_are_not_divided_by(ops: Any) -> None:
    routing = ExpertRouting(4, 2, renormalize=True, scores="sigmoid")
    weights = _Weights("dense", torch.float32, routing=routing, hidden=32, inner=32)
    out = ops.experts(random_tensor(3, 32), torch.full((3, 4), -1e4), weights.prepared(ops))
    assert float(out.abs().max()) < 1e-10


def _logits(style: str, tokens: int, num_experts: int, seed: int) -> Tensor:
    logits = random_tensor(tokens, num_experts, seed=seed)
    if style == "tied":
        return torch.zeros_like(logits)
    if style == "few":  # most experts get no token
        logits[:, num_experts // 2 :] -= 50
    if style == "wide":
        return logits * 30
    return logits


@needs_kernels
@given(
    sets, dtypes, threads, seeds, st.sampled_from(FORMATS),
    st.sampled_from(["usual", "tied", "few", "wide"]), st.integers(1, 60), st.integers(1, 9),
    st.integers(1, 9), st.booleans(), st.integers(1, 5), st.integers(1, 4), st.integers(0, 7),
    st.tuples(st.integers(0, 8), st.integers(1, 9)),
)  # fmt: skip
@settings(max_examples=120, deadline=None, derandomize=True)
def test_kernels_follow_the_reference(
    name: str, dtype: torch.dtype, num_threads: int, seed: int, kind: str, style: str, tokens: int,
    num_experts: int, per_token: int, renormalize: bool, hidden: int, inner: int, ragged: int,
    share: tuple[int, int],
) -> None:  # fmt: skip
    torch.set_num_threads(num_threads)
    more = ragged if kind in ("dense", "int8") else 0
    routing = ExpertRouting(num_experts, min(per_token, num_experts), renormalize)
    weights = _Weights(
        kind, dtype, routing=routing, hidden=32 * hidden + more, inner=32 * inner + more, seed=seed
    )
    x = random_tensor(tokens, 32 * hidden + 2 * more, seed=seed)[:, more:]
    logits = _logits(style, tokens, num_experts, seed)
    first = min(share[0], num_experts - 1)
    ops = kernels(name)
    actual, expected = (
        weights.prepared(ops, first, share[1] + first),
        weights.prepared(REFERENCE, first, share[1] + first),
    )
    _close(ops.experts(x, logits, actual), REFERENCE.experts(x, logits, expected), kind, dtype)
    assert torch.equal(actual.counts, expected.counts)


@pytest.mark.parametrize(
    ("name", "dtype"), [("reference", torch.float32), *product(SETS, DTYPES)], ids=str
)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_is_the_same_in_any_company(name: str, dtype: torch.dtype, kind: str) -> None:
    ops = backend_of(name)
    routing = ExpertRouting(13, 3, renormalize=True)
    weights = _Weights(kind, dtype, routing=routing, hidden=96, inner=160)
    experts = weights.prepared(ops)
    x, logits = (random_tensor(90, n, seed=n) for n in (96, 13))
    torch.set_num_threads(1)
    whole = ops.experts(x, logits, experts)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(ops.experts(x, logits, experts), whole)
        for start, size in ((0, 1), (1, 2), (13, 7), (5, 24), (40, 50), (89, 1)):
            part = slice(start, start + size)
            assert torch.equal(ops.experts(x[part], logits[part], experts), whole[part])
        shuffled = torch.randperm(90, generator=torch.Generator().manual_seed(2))
        assert torch.equal(ops.experts(x[shuffled], logits[shuffled], experts), whole[shuffled])


@pytest.mark.parametrize("ends", [(4, 8), (2, 4, 6, 8), (1, 7, 8)])
def test_shares_of_experts_add_up_to_the_whole(ops: Any, ends: tuple[int, ...]) -> None:
    routing = ExpertRouting(8, 3, renormalize=False)
    weights = _Weights("dense", torch.float32, routing=routing, hidden=64, inner=48)
    x, logits = (random_tensor(30, n, seed=n, dtype=torch.float32) for n in (64, 8))
    whole = weights.prepared(ops)
    expected = ops.experts(x, logits, whole)
    shares = [weights.prepared(ops, *pair) for pair in zip((0, *ends), ends, strict=False)]
    total = sum(ops.experts(x, logits, share) for share in shares)
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)
    for share in shares:  # each rank knows the load of all
        assert torch.equal(share.counts, whole.counts)
    once = whole.counts.clone()
    ops.experts(x, logits, whole)
    assert torch.equal(whole.counts, 2 * once)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_a_number_spoils_its_own_row_only(ops: Any, poison: float) -> None:
    routing = ExpertRouting(5, 2, renormalize=True)
    experts = _Weights("dense", torch.float32, routing=routing, hidden=32, inner=32).prepared(ops)
    x, logits = (random_tensor(9, n, seed=n, dtype=torch.float32) for n in (32, 5))
    expected = ops.experts(x, logits, experts)
    x[4], logits[4] = poison, torch.nan
    actual = ops.experts(x, logits, experts)
    assert actual[4].isnan().all()
    others = [i for i in range(9) if i != 4]
    assert torch.equal(actual[others], expected[others])


class _Layer:
    """A forward pass that is little but experts."""

    def __init__(self, ops: SingleOperations, kind: str, dtype: torch.dtype) -> None:
        routing = ExpertRouting(6, 2, renormalize=True)
        weights = _Weights(kind, dtype, routing=routing, hidden=64, inner=96)
        self.experts = weights.prepared(ops)
        self.embedding, self.router = (
            ops.prepare_linear(
                [DenseWeight(random_tensor(outputs, 64, seed=outputs, dtype=dtype))], None, dtype
            )
            for outputs in (50, 6)
        )
        self.norm = torch.ones(64)

    def graph(self, group: Collectives) -> Graph:
        ops = GraphBuilder(group)
        x = ops.embedding(ops.input("token_ids"), self.embedding)
        for _ in range(2):
            h = ops.rms_norm(x, self.norm, 1e-6)
            x = ops.add(x, ops.experts(h, ops.linear(h, self.router), self.experts))
            h = ops.rms_norm(x, self.norm, 1e-6)
        ops.result("out", h)
        return ops.build()


@needs_kernels
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_program_gives_the_bits_of_its_operations(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    ops = kernels(name)
    layer = _Layer(ops, kind, dtype)
    graph = layer.graph(ops.group)
    compiled = ops.compile(graph)
    for num_threads, tokens in ((1, 5), (2, 41), (3, 1), (2, 17)):
        torch.set_num_threads(num_threads)
        ids = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(tokens))
        step: StepInput[Any] = StepInput({"token_ids": ids})
        eager = one_by_one(ops.backend, graph, step)
        before = layer.experts.counts.clone()
        assert torch.equal(compiled(step, ["out"])[0], eager)
        assert int((layer.experts.counts - before).sum()) == 2 * 2 * tokens


@needs_kernels
def test_experts_that_do_not_fit_are_refused() -> None:
    ops = kernels(SETS[-1])
    routing = ExpertRouting(4, 2, renormalize=True)
    weights = _Weights("dense", torch.float32, routing=routing, hidden=32, inner=64)
    experts, x = weights.prepared(ops), torch.zeros(2, 32)
    with pytest.raises(ValueError, match="Logits of 5 are not those of 4 experts"):
        ops.experts(x, torch.zeros(2, 5), experts)
    with pytest.raises(ValueError, match="3 do not fit a weight of 32 inputs"):
        ops.experts(torch.zeros(2, 3), torch.zeros(2, 4), experts)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"correction": torch.zeros(3)}, "A correction must be 4 of float32"),
        ({"first": 1}, "no 4 experts from 1 on"),
        ({"up": experts.down}, "must be of one shape"),
        ({"down": experts.down[:3]}, "must be of one shape"),
        ({"counts": torch.zeros(3, dtype=torch.int64)}, "Counts must be 4 of int64"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            ops.experts(x, torch.zeros(2, 4), replace(experts, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 9}, "9 of 8 experts are no choice"),
        ({"num_groups": 3}, "1 of 3 groups of 8 experts are no choice"),
        ({"num_groups": 4, "groups_per_token": 5}, "5 of 4 groups of 8 experts are no choice"),
        ({"num_groups": 4, "experts_per_token": 3}, "1 groups of 2 experts do not have 3"),
        ({"num_groups": 8, "group_score": "best_two"}, "two best experts have at least two"),
    ],
)
def test_a_rule_that_is_no_choice_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(ExpertRouting(8, 2, renormalize=True), **changes)


class _Deserted:
    """A group whose other ranks are gone."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.calls = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls += 1
        raise ConnectionError(f"rank 1 is gone, {len(x)} rows were here")


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 3])
def test_nothing_is_computed_behind_an_exchange_that_fails(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    group: Any = _Deserted()
    ops = SingleOperations(CpuBackend(SETS[-1], group))
    layer = _Layer(ops, "dense", torch.float32)
    builder = GraphBuilder(group)
    x = builder.embedding(builder.input("token_ids"), layer.embedding)
    for _ in range(2):
        h = builder.linear(builder.all_reduce(x), layer.router)
        x = builder.experts(
            builder.embedding(builder.input("token_ids"), layer.embedding), h, layer.experts
        )
    builder.result("out", x)
    compiled = ops.compile(builder.build())
    step: StepInput[Any] = StepInput({"token_ids": torch.arange(40)})
    for times in (1, 2):
        with pytest.raises(ConnectionError, match="rank 1 is gone"):
            compiled(step, ["out"])
        assert group.calls == times
        assert not layer.experts.counts.any()
