# SPDX-License-Identifier: Apache-2.0
"""Steps of a small graph on the emulated device: captured, padded, late, and kept apart from one another."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from counting import CountingDevice
from torch import Tensor

from pagoda.backend.base import (
    Backend,
    DeviceLostError,
    FutureTokens,
    KVCache,
    StepInput,
    TokenBatch,
)
from pagoda.backend.graph import Graph
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.weights import DenseWeight
from pagoda.plugins.backend_check.subject import batch_of_spans, random_tensor
from pagoda.plugins.backend_check.threads import ThreadGroup, ThreadRank
from pagoda.plugins.cuda.backend import GpuBackend
from pagoda.plugins.cuda.emulation import GRAPH_BYTES, EmulatedStream
from pagoda.plugins.cuda.program import MOST_GRAPHS
from pagoda.plugins.cuda.runtime import Work
from pagoda.plugins.cuda.slot_mapping import MOST_CAPTURED, padded_size
from pagoda.telemetry.tracer import Tracer

HEADS, DIM, WIDTH, VOCAB = 2, 16, 32, 40
SPANS = [(4, 1, [3]), (0, 1, [1]), (17, 1, [5, 2])]


class IdleStream(EmulatedStream):
    """A stream that does none of its work."""

    def run(self, work: Work) -> None:  # noqa: ARG002
        super().run(lambda: None)


@dataclass
class Model:
    """One layer with attention, on a backend."""

    backend: Backend[Any, Any]
    cache: KVCache
    compiled: Any

    def step(
        self, batch: TokenBatch, token_ids: Tensor, future_tokens: Sequence[FutureTokens] = ()
    ) -> StepInput[Any]:
        tensors = {
            "token_ids": token_ids,
            "positions": batch.positions,
            "rows": torch.arange(len(token_ids)),
        }
        metadata = self.backend.attention_metadata(batch, HEADS, self.cache)
        return StepInput(tensors, {0: metadata}, future_tokens)

    def run(self, batch: TokenBatch, token_ids: Tensor, *results: str) -> list[Tensor]:
        return list(self.compiled(self.step(batch, token_ids), results or ("last",)))


def _graph(
    backend: Backend[Any, Any], cache: KVCache, *, batch_invariant: bool, dtype: torch.dtype
) -> Graph:
    ops = GraphBuilder(backend.group, batch_invariant=batch_invariant)

    def dense(outputs: int, inputs: int, seed: int) -> Any:
        weight = DenseWeight(random_tensor(outputs, inputs, seed=seed) / 4)
        return backend.prepare_linear([weight], None, dtype)

    x = ops.embedding(ops.input("token_ids"), dense(VOCAB, WIDTH, 1))
    frequencies = torch.logspace(0, -2, DIM // 2).to(backend.device)
    table = ops.rotary_table(ops.input("positions"), frequencies, 1.0)
    qkv = ops.linear(x, dense(3 * HEADS * DIM, WIDTH, 2))
    heads = {"num_heads": HEADS, "head_dim": DIM}
    queries = ops.rotate_and_cache(qkv, ops.metadata(), table, cache, None, **heads)
    attended = ops.attention(queries, ops.metadata(), cache, head_dim=DIM, scale=0.2, window=None)
    rows = ops.input("rows")
    attended, x = ops.select_rows(attended, rows), ops.select_rows(x, rows)
    total = ops.add(x, ops.linear(attended, dense(WIDTH, HEADS * DIM, 3)))
    last = ops.rms_norm(total, (1 + random_tensor(WIDTH, seed=4)).to(backend.device), 1e-6)
    ops.result("last", last)
    ops.result("argmax", ops.linear_argmax(last, dense(VOCAB, WIDTH, 5)))
    if backend.group.size > 1:
        ops.result("sum", ops.all_reduce(ops.scale(last, 1.0)))
    return ops.build()


def _model(
    backend: Backend[Any, Any], *, batch_invariant: bool = True, dtype: torch.dtype = torch.float32
) -> Model:
    cache = backend.allocate_kv_cache(8, 16, HEADS, DIM, torch.float32)
    if isinstance(backend, ReferenceBackend):
        for tensor in cache.tensors.values():
            tensor.zero_()
    graph = _graph(backend, cache, batch_invariant=batch_invariant, dtype=dtype)
    return Model(backend, cache, backend.compile(graph))


class LibraryDevice(CountingDevice):
    """A device that notes the shapes of its library's products."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, int, int]] = []

    def library_product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        assert x.dtype == weight.dtype
        self.products.append((*x.shape, len(weight)))
        super().library_product(x, weight, out)


def _on_device() -> tuple[Model, CountingDevice]:
    device = CountingDevice()
    return _model(GpuBackend(device)), device


def _filled(model: Model) -> None:
    """Computes what lies before `SPANS`."""
    prompt = batch_of_spans([(0, 4, [3]), (0, 17, [5, 2])])
    model.run(prompt, torch.arange(21) % VOCAB)


def test_a_step_is_captured_when_its_shape_comes_again() -> None:
    model, device = _on_device()
    expected = _model(ReferenceBackend())
    _filled(model)
    _filled(expected)
    batch, found = batch_of_spans(SPANS), []
    for number in range(4):
        ids = torch.tensor([7, 8, 9]) + number
        (own,), (wanted,) = (each.run(batch, ids) for each in (model, expected))
        found.append((own, wanted))
    assert device.num_captured == 1
    for own, wanted in found:  # later steps did not write to results of earlier ones
        assert own.shape == wanted.shape
        assert torch.allclose(own.cpu(), wanted, atol=1e-5)
    assert device.num_replayed == 3
    # Fewer rows are another shape; as many with longer contexts are the same.
    model.run(batch_of_spans(SPANS[:2]), torch.tensor([1, 2]))
    model.run(batch_of_spans([*SPANS, (5, 1, [4])]), torch.tensor([1, 2, 3, 4]))
    assert device.num_captured == 1


def test_exchanges_between_ranks_are_captured() -> None:
    group = ThreadGroup(2)

    def run(rank: int) -> tuple[int, int, list[Tensor]]:
        device = CountingDevice()
        backend = GpuBackend(device)
        backend.join(ThreadRank(group, rank))
        model = _model(backend)
        _filled(model)
        found = []
        for number in range(3):  # by launches, by a capture, and by a replay
            ids = torch.tensor([7, 8, 9]) + number + 10 * rank
            own = model.run(batch_of_spans(SPANS), ids, "last", "sum")
            found += [each.cpu() for each in own]
        return device.num_captured, device.num_replayed, found

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(run, range(2)))
    assert [rank[:2] for rank in ranks] == [(1, 2), (1, 2)]
    (*_, first), (*_, second) = ranks
    for last in range(0, 6, 2):
        wanted = first[last] + second[last]
        assert torch.equal(first[last + 1], wanted)
        assert torch.equal(second[last + 1], wanted)


def test_steps_of_a_prompt_are_not_captured() -> None:
    model, device = _on_device()
    for _ in range(3):
        _filled(model)
    assert device.num_captured == 0


def test_inputs_may_change_once_a_step_is_launched() -> None:
    model, _ = _on_device()
    _filled(model)
    batch, ids = batch_of_spans(SPANS), torch.tensor([7, 8, 9])
    (wanted,) = model.run(batch, ids)
    kept = wanted.cpu()
    step = model.step(batch, ids)
    (again,) = model.compiled(step, ["last"])
    ids.fill_(0)
    batch.positions.fill_(0)
    batch.block_tables[0].fill_(7)
    del step
    model.backend.attention_metadata(batch_of_spans(SPANS[::-1]), HEADS, model.cache)
    assert torch.equal(again.cpu(), kept)


def test_a_step_takes_tokens_that_only_the_device_knows() -> None:
    model, device = _on_device()
    _filled(model)
    assert isinstance(model.backend, GpuBackend)
    batch = batch_of_spans(SPANS)
    for _ in range(3):  # by launches, by a capture, and by a replay
        (last,) = model.run(batch, torch.tensor([7, 8, 9]))
        (found,) = model.compiled(StepInput({"last": last}), ["argmax"])
        underway = model.backend.launch_read(found)
        after = batch_of_spans([(5, 1, [3]), (1, 1, [1]), (18, 1, [5, 2])])
        future_tokens = FutureTokens([2, 0], underway.token_ids, [0, 1])
        step = model.step(after, torch.tensor([0, 11, 0]), [future_tokens])
        (own,) = model.compiled(step, ["last"])
        assert not model.backend.launched().done
        tokens = underway.read()[:, 0]
        known = torch.stack((tokens[1], torch.tensor(11), tokens[0]))
        (wanted,) = model.run(after, known)
        assert torch.equal(own.cpu(), wanted.cpu())
    assert device.num_captured == 1


def test_what_does_not_fit_is_refused_before_it_is_launched() -> None:
    model, device = _on_device()
    batch = batch_of_spans(SPANS)
    with pytest.raises(IndexError, match="not from 0 to 39"):
        model.run(batch, torch.tensor([7, VOCAB, 9]))
    step = model.step(batch, torch.tensor([7, 8, 9]))
    other = model.backend.attention_metadata(batch_of_spans(SPANS[:2]), HEADS, model.cache)
    with pytest.raises(ValueError, match="3 tokens do not fit metadata of 2"):
        model.compiled(StepInput(step.tensors, {0: other}), ["last"])
    assert device.steps.record().done


def test_operations_are_those_that_are_measured() -> None:
    model, _ = _on_device()
    _filled(model)
    kinds = [operation.kind for operation in model.compiled.operations(["last"])]
    assert kinds[-2:] == ["linear", "norm"]  # the sum is part of the norm
    step = model.step(batch_of_spans(SPANS), torch.tensor([7, 8, 9]))
    (own,), times = model.compiled.traced(step, ["last"], Tracer("test"))
    assert len(times) == len(kinds)
    assert torch.equal(
        own.cpu(), model.run(batch_of_spans(SPANS), torch.tensor([7, 8, 9]))[0].cpu()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_by_the_library_where_bits_may_depend_on_the_batch(dtype: torch.dtype) -> None:
    device = LibraryDevice()
    model = _model(GpuBackend(device), batch_invariant=False, dtype=dtype)
    expected = _model(ReferenceBackend(), dtype=dtype)
    for each in (model, expected):
        _filled(each)
    ids = torch.tensor([7, 8, 9])
    (own,), (wanted,) = (each.run(batch_of_spans(SPANS), ids) for each in (model, expected))
    assert torch.allclose(own.cpu(), wanted, atol=1e-5 if dtype == torch.float32 else 2e-2)
    wide = HEADS * DIM
    assert device.products[:2] == [(21, WIDTH, 3 * wide), (21, wide, WIDTH)]


def test_products_are_in_tiles_where_the_library_would_round_inputs_too_far() -> None:
    device = LibraryDevice()
    model = _model(GpuBackend(device), batch_invariant=False, dtype=torch.float16)
    _filled(model)
    device.steps.synchronize()
    assert not device.products


def _fault() -> None:
    raise RuntimeError("an illegal memory access was encountered")


def test_a_failed_device_is_no_fault_of_the_step_that_meets_it() -> None:
    model, device = _on_device()
    assert isinstance(model.backend, GpuBackend)
    batch, ids = batch_of_spans(SPANS), torch.tensor([7, 8, 9])
    (last,) = model.run(batch, ids)
    device.fails = True
    with pytest.raises(RuntimeError, match="the launch was refused"):  # by a device that goes on
        model.run(batch, ids)
    device.fails = False
    underway = model.backend.launch_read(model.compiled(StepInput({"last": last}), ["argmax"])[0])
    device.steps.run(_fault)
    with pytest.raises(DeviceLostError, match="has failed: an illegal"):
        model.compiled.traced(model.step(batch, ids), ["last"], Tracer("test"))
    underway.read()  # what was computed before is there
    device.fails = True
    with pytest.raises(DeviceLostError, match="has failed: the launch"):
        model.run(batch, ids)


def test_captured_steps_of_all_sizes_take_no_more_memory_than_was_profiled() -> None:
    model, device = _on_device()
    device.steps = IdleStream(device)
    length = 1500
    blocks = [place % 8 for place in range(-(-length // 16))]
    step = model.step(batch_of_spans([(length - 128, 128, blocks)]), torch.zeros(128).long())
    profiled = model.compiled.profile(step, ["last"])
    del step
    before = device.free_bytes()
    sizes = sorted({padded_size(rows) for rows in range(1, MOST_CAPTURED + 1)})
    for context in (1, length):
        for size in sizes:
            batch = batch_of_spans([(context - 1, 1, blocks)] * size)
            for _ in range(3):
                model.run(batch, torch.zeros(size).long())
                device.steps.synchronize()
    assert device.num_captured == 2 * len(sizes) > MOST_GRAPHS
    assert MOST_GRAPHS * GRAPH_BYTES < before - device.free_bytes() <= profiled


def test_the_captured_step_that_was_not_used_for_longest_gives_way() -> None:
    model, device = _on_device()
    device.steps = IdleStream(device)

    def run(size: int, context: int) -> None:
        batch = batch_of_spans([(context - 1, 1, [*range(8)] * 200)] * size)
        model.run(batch, torch.zeros(size).long())

    shapes = [(size, 1 << power) for power in range(10, 15) for size in range(8, 129, 8)]
    for shape in shapes[:MOST_GRAPHS]:
        run(*shape)
        run(*shape)
    assert device.num_captured == MOST_GRAPHS
    run(*shapes[0])  # is used again
    run(*shapes[MOST_GRAPHS])
    run(*shapes[MOST_GRAPHS])  # takes the place of the second one
    device.steps.synchronize()
    assert device.num_captured == MOST_GRAPHS + 1
    run(*shapes[0])
    assert device.num_captured == MOST_GRAPHS + 1
    run(*shapes[1])
    assert device.num_captured == MOST_GRAPHS + 2


def test_padding_alone_is_computed_to_no_effect() -> None:
    """What is measured on a device writes to no cache."""
    model, device = _on_device()
    _filled(model)
    device.steps.synchronize()
    kept = {name: each.clone() for name, each in model.cache.tensors.items()}
    done = list[Work]()
    device.captured_bytes = lambda work: done.append(work) or 0  # type: ignore[method-assign, func-returns-value]
    step = model.step(batch_of_spans([(4, 2, [3])]), torch.zeros(2).long())
    model.compiled.profile(step, ["last"])
    (work,) = done
    device.steps.run(work)
    device.steps.synchronize()
    for name, each in model.cache.tensors.items():
        assert torch.equal(each.nan_to_num(7.0), kept[name].nan_to_num(7.0))
