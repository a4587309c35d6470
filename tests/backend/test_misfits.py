# SPDX-License-Identifier: Apache-2.0
"""What does not fit a graph is refused, and what steps bring along is taken as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_cases import SETS, needs_kernels, random_tensor

from pagoda.backend.base import HeadLinears, KVCache, StateCache, StepInput, TokenBatch
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.latent_layers import head_linear, latent_attention
from pagoda.backend.low_rank import LowRank, LowRankMaps
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.state_layers import short_conv
from pagoda.backend.weights import DenseWeight
from pagoda.errors import ConfigError
from pagoda.plugins.backend_check.subject import batch_of_spans

HEADS, KV_HEADS, HEAD_DIM, BLOCKS = 4, 1, 16, 4


def _cache(ops: Any, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM, **sizes: int) -> KVCache:
    num_blocks, block_size = sizes.get("num_blocks", BLOCKS), sizes.get("block_size", 16)
    cache: KVCache = ops.allocate_kv_cache(
        num_blocks, block_size, kv_heads, head_dim, torch.float32
    )
    for part in cache.tensors.values():
        part.zero_()
    return cache


def _attention(ops: Any, cache: KVCache, head_dim: int = HEAD_DIM) -> Any:
    builder, heads = GraphBuilder(ops.group), {"num_heads": HEADS, "head_dim": head_dim}
    qkv = builder.input("qkv", (HEADS + 2 * KV_HEADS) * head_dim)
    metadata = builder.metadata()
    queries = builder.rotate_and_cache(qkv, metadata, None, cache, None, **heads)
    out = builder.attention(queries, metadata, cache, head_dim=head_dim, scale=0.2, window=None)
    builder.result("queries", queries)
    builder.result("out", out)
    return ops.compile(builder.build())


@pytest.fixture
def cpu() -> CpuBackend:
    return CpuBackend(SETS[-1])


@needs_kernels
def test_a_cache_of_other_heads_is_refused_when_a_graph_is_compiled(cpu: CpuBackend) -> None:
    with pytest.raises(ValueError, match="heads of 16 does not fit a cache of heads of 32"):
        _attention(cpu, _cache(cpu, head_dim=32))
    with pytest.raises(ValueError, match=r"Rows of 96 .* a cache of 2 KV heads of 16"):
        _attention(cpu, _cache(cpu, kv_heads=2))
    with pytest.raises(ValueError, match="64 elements does not fit a cache of 3 KV heads of 16"):
        _attention(cpu, _cache(cpu, kv_heads=3))


@needs_kernels
def test_maps_of_heads_that_kernels_do_not_take_are_refused(cpu: CpuBackend) -> None:
    weight = torch.eye(32)
    for part, bias, words in (
        (DenseWeight(weight), torch.ones(32), "have no biases"),
        (cpu.quantize_int8(weight, symmetric=True), None, "are dense"),
    ):
        maps = HeadLinears((cpu.prepare_linear([part], bias, torch.float32),) * 2)
        builder = GraphBuilder(cpu.group)
        builder.result("out", head_linear(builder, builder.input("x", 64), maps))
        with pytest.raises(ValueError, match=words):
            cpu.compile(builder.build())


@needs_kernels
def test_latents_of_two_elements_are_refused(cpu: CpuBackend) -> None:
    cache = cpu.allocate_latent_cache(BLOCKS, 16, 1, 1, torch.float32)
    builder = GraphBuilder(cpu.group)
    latent, rotary = builder.input("latent", HEADS), builder.input("rotary", HEADS)
    out = latent_attention(builder, latent, rotary, builder.metadata(), cache, scale=1.0)
    builder.result("out", out)
    with pytest.raises(ConfigError, match="takes latents of 4 elements or more, not 2"):
        cpu.compile(builder.build())


@needs_kernels
def test_rows_whose_adapters_alone_are_selected_must_be_of_the_step(cpu: CpuBackend) -> None:
    weight = cpu.prepare_linear([DenseWeight(torch.eye(32))], None, torch.float32)
    maps = LowRankMaps(32, (32,), torch.float32)
    cpu.set_low_rank(maps, 0, [LowRank(torch.ones(1, 32), torch.ones(32, 1), 1.0)])
    builder = GraphBuilder(cpu.group)
    rows, adapters = builder.input("rows"), builder.input("adapters")
    hidden = builder.scale(builder.select_rows(builder.input("x", 32), rows), 1.0)
    chosen = builder.select_rows(adapters, rows)
    builder.result("hidden", hidden)
    builder.result(
        "out", builder.add_low_rank(builder.linear(hidden, weight), hidden, chosen, maps)
    )
    compiled, hidden_rows = cpu.compile(builder.build()), torch.eye(32)[:2]

    def out(*rows: int, **adapters: torch.Tensor) -> torch.Tensor:
        step: StepInput[Any] = StepInput(
            {"hidden": hidden_rows, "rows": torch.tensor(rows), **adapters}
        )
        return compiled(step, ["out"])[0]

    numbers = torch.tensor([-1, 0, -1])
    assert torch.equal(out(1, 0, adapters=numbers)[0], hidden_rows[0] + 1)
    assert torch.equal(out(5, 6), hidden_rows)
    for wrong in (3, -1, 10**9):
        with pytest.raises(IndexError, match="not one of the step's 3"):
            out(wrong, 0, adapters=numbers)


@needs_kernels
def test_a_step_without_tokens_has_no_rows(cpu: CpuBackend) -> None:
    builder = GraphBuilder(cpu.group)
    total = builder.add(builder.input("x", 8), builder.input("y", 8))
    builder.result("out", builder.select_rows(total, builder.input("rows")))
    none: StepInput[Any] = StepInput(
        {"x": torch.ones(0, 8), "y": torch.ones(0, 8), "rows": torch.ones(0, dtype=torch.int64)}
    )
    assert cpu.compile(builder.build())(none, ["out"])[0].shape == (0, 8)


@needs_kernels
@pytest.mark.parametrize(
    ("heads", "sizes", "words"),
    [
        (2, {}, "of 2 heads of 16, 1 KV heads and 4 blocks of 16 does not fit a graph of 4"),
        (4, {"block_size": 32}, "blocks of 32 does not fit"),
        (4, {"head_dim": 32}, "4 heads of 32"),
        (4, {"kv_heads": 2}, "2 KV heads"),
        (4, {"num_blocks": 5}, "5 blocks of 16 does not fit a graph .* 4 blocks of 16"),
    ],
)
def test_metadata_of_another_shape_is_refused(
    cpu: CpuBackend, heads: int, sizes: dict[str, int], words: str
) -> None:
    compiled, batch = _attention(cpu, _cache(cpu)), batch_of_spans([(0, 3, [1])])
    metadata = cpu.attention_metadata(batch, heads, _cache(cpu, **sizes))
    qkv = random_tensor(3, 96)
    with pytest.raises(ValueError, match=words):
        compiled(StepInput({"qkv": qkv}, {0: metadata}), ["out"])
    queries = qkv[:, :64].contiguous()
    with pytest.raises(ValueError, match=words):
        compiled(StepInput({"queries": queries}, {0: metadata}), ["out"])
    fits = cpu.attention_metadata(batch, HEADS, _cache(cpu, num_blocks=3))
    compiled(StepInput({"qkv": qkv}, {0: fits}), ["out"])
    elsewhere = cpu.attention_metadata(_with_blocks(batch, [-1]), HEADS, _cache(cpu))
    with pytest.raises(IndexError, match="Blocks of other ranks do not fit a graph of one"):
        compiled(StepInput({"queries": queries}, {0: elsewhere}), ["out"])


def _with_blocks(batch: TokenBatch, blocks: list[int]) -> TokenBatch:
    return replace(batch, block_tables=(torch.tensor([blocks]),))


@needs_kernels
def test_blocks_that_a_cache_lacks_are_refused_when_metadata_is_made(cpu: CpuBackend) -> None:
    batch, cache = batch_of_spans([(0, 3, [1])]), _cache(cpu)
    states = StateCache(_cache(cpu), 16, 8, 3)
    for each in (cache, states):
        heads = HEADS if each is cache else 1
        for block in (BLOCKS, 99, -5000, 2**32):
            with pytest.raises(IndexError, match=f"Block {block} is not one of the cache's 4"):
                cpu.attention_metadata(_with_blocks(batch, [0, block]), heads, each)
        long = batch_of_spans([(0, 40, [0])])
        with pytest.raises(ValueError, match="40 do not fit a table of 1 blocks of 16"):
            cpu.attention_metadata(_with_blocks(long, [0]), heads, each)
        wrong = replace(batch, context_lens=batch.context_lens - 1)
        with pytest.raises(ValueError, match="3 tokens of a context of 2 do not fit"):
            cpu.attention_metadata(wrong, heads, each)
    with pytest.raises(ValueError, match="4 query heads do not share 3 KV heads"):
        cpu.attention_metadata(batch, HEADS, _cache(cpu, kv_heads=3))


@needs_kernels
def test_metadata_of_other_states_is_refused(cpu: CpuBackend) -> None:
    states, channels = StateCache(_cache(cpu), 16, 8, 3), 8
    builder = GraphBuilder(cpu.group)
    x, weight = builder.input("x", channels), random_tensor(4, channels)
    builder.result("out", short_conv(builder, x, builder.metadata(), states, weight))
    compiled, batch = cpu.compile(builder.build()), batch_of_spans([(0, 3, [1])])
    for memory, size in ((_cache(cpu), 8), (_cache(cpu, num_blocks=5), 16)):
        metadata = cpu.attention_metadata(batch, 1, StateCache(memory, size, 8, 3))
        with pytest.raises(ValueError, match=r"^Metadata of 1 heads of 1, .* does not fit"):
            compiled(StepInput({"x": random_tensor(3, channels)}, {0: metadata}), ["out"])


def test_a_sum_or_its_norm_brought_along_stays_as_it_is(ops: Any) -> None:
    builder, weight = GraphBuilder(ops.group), random_tensor(64, seed=1)
    total = builder.add(builder.input("x", 64), builder.input("y", 64))
    normed = builder.rms_norm(total, weight, 1e-6)
    for name, value in (("sum", total), ("norm", normed), ("both", builder.mul(total, normed))):
        builder.result(name, value)
    compiled = ops.compile(builder.build())
    x, y, other = (random_tensor(5, 64, seed=i) for i in (2, 3, 4))
    step = {"x": x, "y": y}
    given = other.clone()
    (norm,) = compiled(StepInput({**step, "sum": given}), ["norm"])
    assert torch.equal(given, other)
    assert torch.equal(norm, ops.rms_norm(other, weight, 1e-6))
    (both,) = compiled(StepInput({**step, "norm": given}), ["both"])
    assert torch.equal(given, other)
    assert torch.equal(both, (x + y) * other)
    (both,) = compiled(StepInput({**step, "sum": x, "norm": given}), ["both"])
    assert torch.equal(both, x * other)
    for names in (["sum"], ["norm"], ["sum", "norm"]):
        found = dict(zip(names, compiled(StepInput(step), names), strict=True))
        assert torch.equal(found.get("sum", x + y), x + y)
        expected = ops.rms_norm(x + y, weight, 1e-6)
        assert torch.equal(found.get("norm", expected), expected)


@pytest.mark.parametrize("name", ["positions", "token_ids", "adapters"])
def test_rows_of_integers_are_selected_whole(ops: Any, name: str) -> None:
    builder = GraphBuilder(ops.group)
    chosen = builder.select_rows(builder.input(name), builder.input("rows"))
    builder.result("chosen", chosen)
    numbers, rows = torch.tensor([10, 2**40 + 11, -12, 13]), torch.tensor([3, 1])
    step: StepInput[Any] = StepInput({name: numbers, "rows": rows})
    (found,) = ops.compile(builder.build())(step, ["chosen"])
    assert found.dtype == torch.int64
    assert found.flatten().tolist() == [13, 2**40 + 11]
