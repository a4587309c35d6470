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
    needs_kernels,
    quantized,
    random_tensor,
    seeds,
    sets,
    threads,
    token_batch,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.base import ExpertRouting, Experts, StepInput
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.weights import DenseWeight, LinearWeight, dequantize
from pagoda.checkpoints.gguf.reader import BLOCK_TYPES
from pagoda.model.ggml_blocks import linear_weight

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
    ) -> None:
        self.routing, self.dtype = routing, dtype
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
            tuple(ops.prepare_linear([weight], None, self.dtype) for weight in weights[first:end])
            for weights in self.maps
        )
        counts = torch.zeros(self.routing.num_experts, dtype=torch.int64)
        return Experts(self.routing, first, gate, up, down, counts)

    def formula(self, x: Tensor, logits: Tensor) -> Tensor:
        """Token by token, in float64, with inputs that are not rounded."""
        routing = self.routing
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, row in enumerate(x.double()):
            probabilities = logits[token].double().softmax(0)
            ranked = sorted(range(routing.num_experts), key=lambda e: (-float(logits[token, e]), e))
            chosen = ranked[: routing.experts_per_token]
            total = sum(float(probabilities[e]) for e in chosen) if routing.renormalize else 1.0
            for e in chosen:
                gate, up, down = (dequantize(weights[e]).double() for weights in self.maps)
                inner = torch.nn.functional.silu(gate @ row) * (up @ row)
                out[token] += probabilities[e] / total * (down @ inner)
        return out


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
    ops = CpuBackend(name)
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

    def __init__(self, ops: CpuBackend, kind: str, dtype: torch.dtype) -> None:
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

    def __call__(self, ops: Any, step: StepInput[Any, Any]) -> Any:
        x = ops.embedding(step.token_ids, self.embedding)
        for _ in range(2):
            h = ops.rms_norm(x, self.norm, 1e-6)
            mixed = ops.experts(h, ops.linear(h, self.router), self.experts)
            x, h = ops.add_rms_norm(x, mixed, self.norm, 1e-6)
        return h


@needs_kernels
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_program_gives_the_bits_of_its_operations(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    ops = CpuBackend(name)
    layer = _Layer(ops, kind, dtype)
    compiled = ops.compile(layer)
    cache = ops.allocate_kv_cache(4, 16, 1, 8, dtype)
    for num_threads, tokens in ((1, 5), (2, 41), (3, 1), (2, 17)):
        torch.set_num_threads(num_threads)
        ids = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(tokens))
        batch = token_batch([(0, tokens, [0, 1, 2])])
        table = ops.rotary_table(batch.positions, torch.ones(4), 1.0)
        step = StepInput(ids, table, ops.attention_metadata(batch, 1, cache))
        eager = layer(ops, step)
        before = layer.experts.counts.clone()
        assert torch.equal(compiled(step), eager)
        assert int((layer.experts.counts - before).sum()) == 2 * 2 * tokens


@needs_kernels
def test_experts_that_do_not_fit_are_refused() -> None:
    ops = CpuBackend(SETS[-1])
    routing = ExpertRouting(4, 2, renormalize=True)
    weights = _Weights("dense", torch.float32, routing=routing, hidden=32, inner=64)
    experts, x = weights.prepared(ops), torch.zeros(2, 32)
    with pytest.raises(ValueError, match="not of 2 tokens"):
        ops.experts(x, torch.zeros(2, 5), experts)
    with pytest.raises(ValueError, match="3 do not fit a weight of 32 inputs"):
        ops.experts(torch.zeros(2, 3), torch.zeros(2, 4), experts)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"routing": replace(routing, experts_per_token=5)}, "5 of 4 experts are no choice"),
        ({"first": 1}, "no 4 experts from 1 on"),
        ({"up": experts.down}, "must be of one shape"),
        ({"down": experts.down[:3]}, "must be of one shape"),
        ({"counts": torch.zeros(3, dtype=torch.int64)}, "Counts must be 4 of int64"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            ops.experts(x, torch.zeros(2, 4), replace(experts, **changes))
