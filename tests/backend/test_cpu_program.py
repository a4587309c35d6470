"""A compiled forward pass gives the bits of its operations one after the other."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from cpu_cases import SETS, needs_kernels, quantized, random_tensor, sets, threads, token_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.base import HeadNorms, KVCache, Operations, StepInput, ValueT
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.weights import AttentionMetadata, PackedLinear
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

    def __call__(
        self,
        ops: Operations[ValueT, PackedLinear, AttentionMetadata],
        step: StepInput[ValueT, AttentionMetadata],
    ) -> ValueT:
        x = ops.embedding(step.token_ids, self.embedding)
        qkv = ops.linear(ops.rms_norm(x, self.norm, 1e-6), self.qkv)
        queries = ops.rotate_and_cache(
            qkv, self.cache, step.plan, step.rotary_table, self.head_norms
        )
        attended = ops.attention(queries, self.cache, step.plan, scale=0.2, window=None)
        if self.selects and step.rows is not None:
            attended, x = ops.select_rows(attended, step.rows), ops.select_rows(x, step.rows)
        x, h = ops.add_rms_norm(x, ops.linear(attended, self.out), self.norm, 1e-6)
        mixed = ops.linear(ops.gated_linear(h, self.gate_up), self.down)
        return ops.add_rms_norm(x, mixed, self.norm, 1e-6)[1]


@dataclasses.dataclass
class _Stage:
    """The same layer as the last of two pipeline stages."""

    layer: _Layer

    def __call__(
        self,
        ops: Operations[ValueT, PackedLinear, AttentionMetadata],
        step: StepInput[ValueT, AttentionMetadata],
    ) -> ValueT:
        assert step.hidden is not None
        x = ops.add(step.hidden, ops.rms_norm(step.hidden, self.layer.norm, 1e-6))
        mixed = ops.linear(ops.gated_linear(x, self.layer.gate_up), self.layer.down)
        return ops.add(step.hidden, mixed)


def _layer(name: str, kind: str, kv_dtype: torch.dtype) -> _Layer:
    ops = CpuBackend(name)
    cache = ops.allocate_kv_cache(12, 16, KV_HEADS, HEAD_DIM, DTYPE, kv_dtype)
    for part in cache.tensors.values():
        part.zero_()
    return _Layer(ops, kind, cache)


def _step(
    ops: CpuBackend, cache: KVCache, lengths: list[int], token_ids: list[int]
) -> StepInput[Tensor, AttentionMetadata]:
    batch = token_batch([(0, n, list(range(3 * i, 3 * i + 3))) for i, n in enumerate(lengths)])
    frequencies = torch.linspace(1, 0.01, HEAD_DIM // 2)
    return StepInput(
        torch.tensor(token_ids),
        ops.rotary_table(batch.positions, frequencies, 1.0),
        ops.attention_metadata(batch, HEADS, cache),
    )


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
    compiled = layer.ops.compile(layer)
    for lengths in steps:  # larger and smaller ones in turn use the same memory
        ids = st.lists(st.integers(0, VOCAB - 1), min_size=sum(lengths), max_size=sum(lengths))
        step = _step(layer.ops, layer.cache, lengths, data.draw(ids))
        expected = layer(layer.ops, step)
        assert torch.equal(compiled(step), expected)
        began = time.perf_counter_ns()
        timed, times = compiled.traced(step, Tracer("worker"))
        elapsed = time.perf_counter_ns() - began
        assert torch.equal(timed, expected)
        assert len(times) == len(compiled.operations)
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
    selecting = dataclasses.replace(layer, selects=True)
    compiled = layer.ops.compile(selecting)
    assert [each.kind for each in compiled.operations].count("select") == 2
    step = _step(layer.ops, layer.cache, lengths, [i % VOCAB for i in range(sum(lengths))])
    whole = layer(layer.ops, step)
    for _ in range(2):
        rows = data.draw(st.lists(st.integers(0, sum(lengths) - 1), unique=True))
        wanted = dataclasses.replace(step, rows=torch.tensor(rows, dtype=torch.int64))
        expected = whole[rows] if rows else whole[:0]
        assert torch.equal(compiled(wanted), expected)
        assert torch.equal(selecting(layer.ops, wanted), expected)


def test_rows_must_be_of_the_step() -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    compiled = layer.ops.compile(dataclasses.replace(layer, selects=True))
    step = _step(layer.ops, layer.cache, [3], [1, 2, 3])
    with pytest.raises(ValueError, match="needs their numbers"):
        compiled(step)
    for rows in ([3], [-1]):
        with pytest.raises(IndexError, match="not one of the step's 3"):
            compiled(dataclasses.replace(step, rows=torch.tensor(rows)))
    with pytest.raises(IndexError, match="More rows are wanted"):
        compiled(dataclasses.replace(step, rows=torch.tensor([0, 1, 2, 0])))


@dataclasses.dataclass
class _Gated:
    """A gated map of embedded tokens."""

    layer: _Layer

    def __call__(
        self,
        ops: Operations[ValueT, PackedLinear, AttentionMetadata],
        step: StepInput[ValueT, AttentionMetadata],
    ) -> ValueT:
        return ops.gated_linear(
            ops.embedding(step.token_ids, self.layer.embedding), self.layer.gate_up
        )


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["dense", "int8", "int4", "mixed"])
@pytest.mark.parametrize("inner", [INNER, INNER + 16])
def test_a_gated_map_of_many_rows(name: str, kind: str, inner: int) -> None:
    layer = _layer(name, kind, DTYPE)
    layer.gate_up = _linear(layer.ops, kind, 2 * inner, HIDDEN, 4)
    cache = layer.ops.allocate_kv_cache(40, 16, KV_HEADS, HEAD_DIM, DTYPE)
    batch = token_batch([(0, 300, list(range(19)))])
    plan = layer.ops.attention_metadata(batch, HEADS, cache)
    table = layer.ops.rotary_table(batch.positions, torch.ones(HEAD_DIM // 2), 1.0)
    step = StepInput(torch.arange(300) % VOCAB, table, plan)
    gated = _Gated(layer)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert torch.equal(layer.ops.compile(gated)(step), gated(layer.ops, step))


def test_operations_are_told_by_their_weights() -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    names = {id(layer.qkv): "layers.7.qkv", id(layer.embedding): "embedding"}
    operations = layer.ops.compile(layer, None, names).operations
    assert [(each.name, each.kind) for each in operations] == [
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


def test_each_part_of_a_mixed_map_is_an_operation() -> None:
    layer = _layer(SETS[-1], "mixed", DTYPE)
    operations = layer.ops.compile(layer, None, {id(layer.gate_up): "gate_up"}).operations
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
    stage = _Stage(layer)
    hidden = random_tensor(sum(lengths), HIDDEN, seed=seed)
    before = hidden.clone()
    # Nobody looks at the ids of tokens that were embedded elsewhere.
    step = _step(layer.ops, layer.cache, lengths, [-1] * len(hidden))
    step = dataclasses.replace(step, hidden=hidden)
    result = layer.ops.compile(stage, HIDDEN)(step)
    assert torch.equal(result, stage(layer.ops, step))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (None, "without hidden states"),
        (torch.zeros(3, HIDDEN, dtype=DTYPE), r"torch\.bfloat16, but torch\.float32 is needed"),
        (torch.zeros(3, HIDDEN + 1), r"Rows of 65"),
        (torch.zeros(2, HIDDEN), "Hidden states of 2 tokens do not fit 3"),
    ],
)
def test_hidden_states_that_do_not_fit_are_refused(hidden: Tensor | None, message: str) -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    compiled = layer.ops.compile(_Stage(layer), HIDDEN)
    step = _step(layer.ops, layer.cache, [3], [0, 1, 2])
    with pytest.raises(ValueError, match=message):
        compiled(dataclasses.replace(step, hidden=hidden))


@dataclasses.dataclass
class _Rows:
    """Rows of a part of an embedding table."""

    weight: PackedLinear
    first_id: int
    vocab_size: int | None

    def __call__(
        self,
        ops: Operations[ValueT, PackedLinear, AttentionMetadata],
        step: StepInput[ValueT, AttentionMetadata],
    ) -> ValueT:
        return ops.embedding(step.token_ids, self.weight, self.first_id, self.vocab_size)


@pytest.mark.parametrize("kind", ["dense", "int8", "int4"])
@pytest.mark.parametrize("name", SETS)
def test_parts_of_an_embedding_table_add_up_to_it(name: str, kind: str) -> None:
    layer = _layer(name, kind, DTYPE)
    ids = list(range(VOCAB))
    step = _step(layer.ops, layer.cache, [25, VOCAB - 25], ids)
    whole = layer.ops.embedding(step.token_ids, layer.embedding)
    values = random_tensor(VOCAB, HIDDEN, seed=1, dtype=DTYPE) * HIDDEN**-0.5
    total = torch.zeros_like(whole)
    for part in torch.tensor(ids).split(17):
        packed = layer.ops.prepare_linear([quantized(layer.ops, kind, values[part])], None, DTYPE)
        rows = _Rows(packed, int(part[0]), VOCAB)
        recorded = layer.ops.compile(rows)(step)
        assert torch.equal(recorded, rows(layer.ops, step))
        assert torch.equal(recorded[part], whole[part])
        total += recorded
    assert torch.equal(total, whole)


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_the_whole_table_says_which_tokens_exist(token_id: int) -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    step = _step(layer.ops, layer.cache, [2], [0, token_id])
    for vocab_size, first_id in ((VOCAB, 20), (None, 0)):
        rows = _Rows(layer.embedding, first_id, vocab_size)
        for compute in (layer.ops.compile(rows), lambda step, rows=rows: rows(layer.ops, step)):
            with pytest.raises(IndexError, match="A token id is not from 0 to 49"):
                compute(step)


def test_a_step_that_does_not_fit_its_plan_is_refused() -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    step = _step(layer.ops, layer.cache, [3], [0, 1, 2])
    longer = dataclasses.replace(step, token_ids=torch.tensor([0, 1, 2, 3]))
    with pytest.raises(ValueError, match="4 tokens do not fit the plan"):
        layer.ops.compile(layer)(longer)


def test_weights_that_do_not_fit_are_refused_while_recording() -> None:
    layer = _layer(SETS[-1], "dense", DTYPE)
    layer.down = layer.out
    with pytest.raises(ValueError, match="Rows of 96 do not fit a weight of 128"):
        layer.ops.compile(layer)
