# SPDX-License-Identifier: Apache-2.0
"""A graph gives the bits of its operations, each computed as a graph of its own."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from cpu_cases import SETS, needs_kernels, quantized, random_tensor, sets, threads
from hypothesis import given, settings
from hypothesis import strategies as st
from single_operations import SingleOperations, one_by_one
from torch import Tensor

from pagoda.backend.base import HeadNorms, KVCache, StepInput
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.weights import NativeAttentionMetadata, PackedLinear
from pagoda.backend.graph import Graph
from pagoda.backend.norms_over_ranks import norm_by_squares, sum_of_squares
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.state_layers import gated_head_norm
from pagoda.plugins.backend_check.subject import batch_of_spans
from pagoda.telemetry.tracer import Tracer

pytestmark = needs_kernels

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 4, 2, 32, 64, 96, 50
DTYPE = torch.bfloat16


def _linear(ops: CpuBackend, kind: str, outputs: int, inputs: int, seed: int) -> PackedLinear:
    values = random_tensor(outputs, inputs, seed=seed, dtype=DTYPE) * inputs**-0.5
    parts = [(kind, values)]
    if kind == "mixed":  # one segment after the other
        halves = values.split([outputs // 2, outputs - outputs // 2])
        parts = list(zip(("dense", "int4"), halves, strict=True))
    return ops.prepare_linear([quantized(ops, *part) for part in parts], None, DTYPE)


@dataclasses.dataclass
class _Layer:
    """One decoder layer of random weights."""

    ops: CpuBackend
    kind: str
    cache: KVCache
    selects: bool = False
    """True for a model's last layer: behind attention, only wanted rows go on."""

    def __post_init__(self) -> None:
        ops, kind, width = self.ops, self.kind, HEADS * HEAD_DIM
        self.embedding = _linear(ops, "dense" if kind == "mixed" else kind, VOCAB, HIDDEN, 1)
        self.qkv = _linear(ops, kind, width + 2 * KV_HEADS * HEAD_DIM, HIDDEN, 2)
        self.out = _linear(ops, kind, HIDDEN, width, 3)
        self.gate_up = _linear(ops, kind, 2 * INNER, HIDDEN, 4)
        self.down = _linear(ops, kind, HIDDEN, INNER, 5)
        self.norm = random_tensor(HIDDEN, seed=6)
        head_norm = random_tensor(HEAD_DIM, seed=7)
        self.head_norms = HeadNorms(head_norm, head_norm, 1e-6)

    def graph(self) -> Graph:
        ops = GraphBuilder(self.ops.group)
        metadata, frequencies = ops.metadata(), torch.linspace(1, 0.01, HEAD_DIM // 2)
        x = ops.embedding(ops.input("token_ids"), self.embedding)
        table = ops.rotary_table(ops.input("positions"), frequencies, 1.0)
        qkv = ops.linear(ops.rms_norm(x, self.norm, 1e-6), self.qkv)
        queries = ops.rotate_and_cache(
            qkv, metadata, table, self.cache, self.head_norms, num_heads=HEADS, head_dim=HEAD_DIM
        )
        attended = ops.attention(
            queries, metadata, self.cache, head_dim=HEAD_DIM, scale=0.2, window=None
        )
        if self.selects:
            rows = ops.input("rows")
            attended, x = ops.select_rows(attended, rows), ops.select_rows(x, rows)
        x = ops.add(x, ops.linear(attended, self.out))
        h = ops.rms_norm(x, self.norm, 1e-6)
        x = ops.add(x, ops.linear(ops.silu_and_mul(ops.linear(h, self.gate_up)), self.down))
        h = ops.rms_norm(x, self.norm, 1e-6)
        ops.result("out", h)
        ops.result("logits", ops.linear(h, self.embedding))
        ops.result("argmax", ops.linear_argmax(h, self.embedding))
        return ops.build()


@dataclasses.dataclass
class _Stage:
    """The same layer as the last of two pipeline stages."""

    layer: _Layer

    def graph(self) -> Graph:
        ops = GraphBuilder(self.layer.ops.group)
        hidden = ops.input("hidden", HIDDEN)
        x = ops.add(hidden, ops.rms_norm(hidden, self.layer.norm, 1e-6))
        inner = ops.silu_and_mul(ops.linear(x, self.layer.gate_up))
        ops.result("out", ops.add(hidden, ops.linear(inner, self.layer.down)))
        return ops.build()


def _layer(name: str, kind: str, kv_dtype: torch.dtype) -> _Layer:
    ops = CpuBackend(name)
    cache = ops.allocate_kv_cache(12, 16, KV_HEADS, HEAD_DIM, DTYPE, kv_dtype)
    for part in cache.tensors.values():
        part.zero_()
    return _Layer(ops, kind, cache)


def _step(
    ops: CpuBackend, cache: KVCache, lengths: list[int], token_ids: list[int], **more: Tensor
) -> StepInput[NativeAttentionMetadata]:
    batch = batch_of_spans([(0, n, list(range(3 * i, 3 * i + 3))) for i, n in enumerate(lengths)])
    tensors = {"token_ids": torch.tensor(token_ids), "positions": batch.positions}
    return StepInput(tensors | more, {0: ops.attention_metadata(batch, HEADS, cache)})


def _with(
    step: StepInput[NativeAttentionMetadata], **tensors: Tensor
) -> StepInput[NativeAttentionMetadata]:
    return dataclasses.replace(step, tensors={**step.tensors, **tensors})


@given(
    sets, st.sampled_from(["dense", "int8", "int4", "mixed"]),
    st.sampled_from([torch.bfloat16, torch.int8]),
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=3), threads,
    st.data(),
)  # fmt: skip
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_program_gives_the_bits_of_its_operations(
    name: str, kind: str, kv_dtype: torch.dtype, steps: list[list[int]], num_threads: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    torch.set_num_threads(num_threads)
    layer = _layer(name, kind, kv_dtype)
    graph = layer.graph()
    compiled = layer.ops.compile(graph)
    for lengths in steps:  # larger and smaller ones in turn use the same memory
        ids = st.lists(st.integers(0, VOCAB - 1), min_size=sum(lengths), max_size=sum(lengths))
        step = _step(layer.ops, layer.cache, lengths, data.draw(ids))
        expected = one_by_one(layer.ops, graph, step)
        assert torch.equal(compiled(step, ["out"])[0], expected)
        began = time.perf_counter_ns()
        (timed,), times = compiled.traced(step, ["out"], Tracer("worker"))
        elapsed = time.perf_counter_ns() - began
        assert torch.equal(timed, expected)
        assert len(times) == len(compiled.operations(["out"]))
        assert all(each > 0 for each in times)
        assert sum(times) <= elapsed


@given(
    sets, st.sampled_from(["dense", "int8", "int4", "mixed"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=4), threads, st.data(),
)  # fmt: skip
@settings(max_examples=40, deadline=None, derandomize=True)
def test_only_wanted_rows_go_on(
    name: str, kind: str, lengths: list[int], num_threads: int, data: st.DataObject
) -> None:
    """In any order, and maybe none; with the bits that they have among all rows."""
    torch.set_num_threads(num_threads)
    layer = _layer(name, kind, DTYPE)
    graph = dataclasses.replace(layer, selects=True).graph()
    compiled = layer.ops.compile(graph)
    assert [each.kind for each in compiled.operations(["out"])].count("select") == 2
    step = _step(layer.ops, layer.cache, lengths, [i % VOCAB for i in range(sum(lengths))])
    (whole,) = layer.ops.compile(layer.graph())(step, ["out"])
    for _ in range(2):
        rows = data.draw(st.lists(st.integers(0, sum(lengths) - 1), unique=True))
        wanted = _with(step, rows=torch.tensor(rows, dtype=torch.int64))
        expected = whole[rows] if rows else whole[:0]
        assert torch.equal(compiled(wanted, ["out"])[0], expected)
        assert torch.equal(one_by_one(layer.ops, graph, wanted), expected)


@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize("name", SETS)
def test_results_together_apart_and_from_one_that_is_given(name: str, selects: bool) -> None:
    layer = dataclasses.replace(_layer(name, "dense", DTYPE), selects=selects)
    compiled = layer.ops.compile(layer.graph())
    step = _step(layer.ops, layer.cache, [30, 3], [i % VOCAB for i in range(33)])
    if selects:
        step = _with(step, rows=torch.tensor([32, 0, 5]))
    out, logits, found = compiled(step, ["out", "logits", "argmax"])
    assert torch.equal(logits.argmax(1), found[:, 0])
    assert torch.equal(logits.amax(1).view(torch.int32).long(), found[:, 1])
    for result, expected in (("out", out), ("logits", logits), ("argmax", found)):
        assert torch.equal(compiled(step, [result])[0], expected)
    assert len(compiled.operations(["out"])) + 1 == len(compiled.operations(["logits"]))
    for rows in ([2, 0], [1], []):
        given: StepInput[NativeAttentionMetadata] = StepInput({"out": out[rows]})
        some_logits, some_found = compiled(given, ["logits", "argmax"])
        assert torch.equal(some_logits, logits[rows])
        assert torch.equal(some_found, found[rows])


def test_rows_must_be_of_the_step() -> None:
    layer = dataclasses.replace(_layer(SETS[-1], "dense", DTYPE), selects=True)
    compiled = layer.ops.compile(layer.graph())
    step = _step(layer.ops, layer.cache, [3], [1, 2, 3])
    with pytest.raises(ValueError, match="A step of this graph needs rows"):
        compiled(step, ["out"])
    for rows in ([3], [-1]):
        with pytest.raises(IndexError, match="not one of the step's 3"):
            compiled(_with(step, rows=torch.tensor(rows)), ["out"])
    with pytest.raises(IndexError, match="More rows are wanted"):
        compiled(_with(step, rows=torch.tensor([0, 1, 2, 0])), ["out"])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["dense", "int8", "int4", "mixed"])
@pytest.mark.parametrize("inner", [INNER, INNER + 16])
def test_a_gated_map_of_many_rows(name: str, kind: str, inner: int) -> None:
    layer = _layer(name, kind, DTYPE)
    weight = _linear(layer.ops, kind, 2 * inner, HIDDEN, 4)
    ops = GraphBuilder(layer.ops.group)
    x = ops.embedding(ops.input("token_ids"), layer.embedding)
    ops.result("out", ops.silu_and_mul(ops.linear(x, weight)))
    graph, step = (
        ops.build(),
        StepInput[NativeAttentionMetadata]({"token_ids": torch.arange(300) % VOCAB}),
    )
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        (gated,) = layer.ops.compile(graph)(step, ["out"])
        assert torch.equal(gated, one_by_one(layer.ops, graph, step))


def test_operations_are_told_by_their_weights() -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    names = {id(layer.qkv): "layers.7.qkv", id(layer.embedding): "embedding"}
    operations = layer.ops.compile(layer.graph(), names).operations(["out"])
    assert [(each.name, each.kind) for each in operations] == [
        ("rotary", "rotary"),
        ("embedding", "embedding"),
        ("norm", "norm"),
        ("layers.7.qkv", "linear"),
        ("layers.7.rotary", "rotary"),
        ("layers.7.attention", "attention"),
        ("layers.7.linear", "linear"),
        ("layers.7.norm", "norm"),
        ("layers.7.linear", "linear"),
        ("layers.7.linear", "linear"),
        ("layers.7.norm", "norm"),
    ]
    by_name = {each.name: each for each in operations}
    qkv, norm, attention = (by_name[f"layers.7.{name}"] for name in ("qkv", "norm", "attention"))
    weights = (HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN
    assert (qkv.weight_bytes, qkv.flops_per_token) == (2 * weights, 2 * weights)
    assert (norm.weight_bytes, norm.flops_per_token) == (4 * HIDDEN, 0)
    assert (attention.weight_bytes, attention.flops_per_token) == (0, 0)


def test_norms_of_heads_count_the_weights_that_they_have() -> None:
    backend = _layer(SETS[-1], "dense", DTYPE).ops
    ops = GraphBuilder(backend.group)
    qkv, gate = ops.input("qkv", 96), ops.input("gate", 96)
    norms = HeadNorms(torch.ones(48), torch.ones(24), 1e-6)
    squares = sum_of_squares(ops, qkv, queries=48, keys=24)
    normed = norm_by_squares(ops, qkv, squares, norms, all_queries=48, all_keys=24)
    ops.result("out", gated_head_norm(ops, normed, gate, torch.ones(32), 1e-6))
    operations = backend.compile(ops.build()).operations(["out"])
    assert [each.weight_bytes for each in operations] == [0, 4 * (48 + 24), 4 * 32]


def test_each_part_of_a_mixed_map_is_an_operation() -> None:
    layer = _layer(SETS[-1], "mixed", DTYPE)
    operations = layer.ops.compile(layer.graph(), {id(layer.gate_up): "gate_up"}).operations(
        ["out"]
    )
    dense, int4 = (each for each in operations if each.name == "gate_up")
    assert dense.weight_bytes == 2 * INNER * HIDDEN
    assert int4.weight_bytes == INNER * HIDDEN // 2 + INNER * HIDDEN // 32 * 2
    assert dense.flops_per_token == int4.flops_per_token == 2 * INNER * HIDDEN


@given(
    name=sets,
    kind=st.sampled_from(["dense", "int8"]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_program_starts_from_hidden_states(
    name: str, kind: str, lengths: list[int], seed: int
) -> None:
    layer = _layer(name, kind, DTYPE)
    graph = _Stage(layer).graph()
    hidden = random_tensor(sum(lengths), HIDDEN, seed=seed)
    before = hidden.clone()
    # Nobody looks at the ids of tokens that were embedded elsewhere.
    step = _step(layer.ops, layer.cache, lengths, [-1] * len(hidden), hidden=hidden)
    (result,) = layer.ops.compile(graph)(step, ["out"])
    assert torch.equal(result, one_by_one(layer.ops, graph, step))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (None, "A step of this graph needs hidden"),
        (torch.zeros(3, HIDDEN, dtype=DTYPE), r"torch\.bfloat16, but torch\.float32 is needed"),
        (torch.zeros(3, HIDDEN + 1), "Rows of hidden are of 65, not 64"),
        (torch.zeros(2, 2, HIDDEN), "Rows of hidden are of 128, not 64"),
    ],
)
def test_hidden_states_that_do_not_fit_are_refused(hidden: Tensor | None, message: str) -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    compiled = layer.ops.compile(_Stage(layer).graph())
    step = _step(layer.ops, layer.cache, [3], [0, 1, 2])
    with pytest.raises(ValueError, match=message):
        compiled(step if hidden is None else _with(step, hidden=hidden), ["out"])


@pytest.mark.parametrize("kind", ["dense", "int8", "int4"])
@pytest.mark.parametrize("name", SETS)
def test_parts_of_an_embedding_table_add_up_to_it(name: str, kind: str) -> None:
    layer = _layer(name, kind, DTYPE)
    ids = list(range(VOCAB))
    ops, token_ids = SingleOperations(layer.ops), torch.tensor(ids)
    whole = ops.embedding(token_ids, layer.embedding)
    values = random_tensor(VOCAB, HIDDEN, seed=1, dtype=DTYPE) * HIDDEN**-0.5
    total = torch.zeros_like(whole)
    for part in torch.tensor(ids).split(17):
        packed = ops.prepare_linear([quantized(ops, kind, values[part])], None, DTYPE)
        rows = ops.embedding(token_ids, packed, int(part[0]), VOCAB)
        assert torch.equal(rows[part], whole[part])
        total += rows
    assert torch.equal(total, whole)


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_the_whole_table_says_which_tokens_exist(token_id: int) -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    ops = SingleOperations(layer.ops)
    for vocab_size, first_id in ((VOCAB, 20), (None, 0)):
        with pytest.raises(IndexError, match="A token id is not from 0 to 49"):
            ops.embedding(torch.tensor([0, token_id]), layer.embedding, first_id, vocab_size)


def test_a_step_that_does_not_fit_its_metadata_is_refused() -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    compiled = layer.ops.compile(layer.graph())
    step = _step(layer.ops, layer.cache, [3], [0, 1, 2])
    four = torch.tensor([0, 1, 2, 3])
    with pytest.raises(ValueError, match="4 tokens do not fit metadata of 3"):
        compiled(_with(step, token_ids=four, positions=four), ["out"])
    with pytest.raises(ValueError, match="of 3 rows does not fit inputs of 4"):
        compiled(_with(step, token_ids=four), ["out"])
    with pytest.raises(ValueError, match="needs metadata of group 0"):
        compiled(StepInput(step.tensors), ["out"])
