# SPDX-License-Identifier: Apache-2.0
"""Layers with a state on the emulated device: captured steps, late ones, and states that are copied as blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from counting import CountingDevice
from torch import Tensor

from pagoda.backend.base import Backend, KVCache, StateCache, StepInput, TokenBatch
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.state_layers import gated_delta, short_conv
from pagoda.plugins.backend_check.subject import batch_of_spans, random_tensor
from pagoda.plugins.cuda.backend import GpuBackend

BLOCK, NUM_BLOCKS = 16, 8
KEY_HEADS, HEADS, DIM = 1, 3, 4
CHANNELS, WIDTH = 2 * KEY_HEADS * DIM + HEADS * DIM, 4
PROMPTS = [(0, 4, [3]), (0, 17, [5, 2])]
SINGLE = [(4, 1, [3]), (0, 1, [1]), (17, 1, [5, 2])]
WRITTEN = [1, 2, 3, 5]
"""Blocks of these sequences."""


@dataclass
class Layer:
    """A convolution and a delta rule behind it, with both states in blocks of one cache, on a backend."""

    backend: Backend[Any, Any]
    memory: KVCache
    states: tuple[StateCache, StateCache]
    compiled: Any

    @classmethod
    def on(cls, backend: Backend[Any, Any], kv_dtype: torch.dtype = torch.float32) -> Layer:
        memory = backend.allocate_kv_cache(
            NUM_BLOCKS, BLOCK, 2, 16, torch.float32, kv_dtype=kv_dtype
        )
        for tensor in memory.tensors.values():
            tensor.view(torch.uint8).fill_(0xFF)
        conv = StateCache(memory, BLOCK, CHANNELS, WIDTH - 1)
        heads = StateCache(memory, BLOCK, HEADS, DIM * DIM, conv.room)
        ops = GraphBuilder(backend.group)
        metadata = ops.metadata()
        weight, decay, bias = (
            random_tensor(*shape, seed=len(shape) + shape[0]).to(backend.device)
            for shape in ((WIDTH, CHANNELS), (HEADS,), (HEADS,))
        )
        qkv = short_conv(ops, ops.input("qkv", CHANNELS), metadata, conv, weight, silu=True)
        gates, sizes = ops.input("gates", 2 * HEADS), {"key_heads": KEY_HEADS, "key_dim": DIM}
        out = gated_delta(ops, qkv, gates, metadata, heads, -decay.abs(), bias, **sizes)
        ops.result("out", out)
        return cls(backend, memory, (conv, heads), backend.compile(ops.build()))

    def run(self, batch: TokenBatch, seed: int) -> Tensor:
        n = len(batch.positions)
        tensors = {
            "qkv": random_tensor(n, CHANNELS, seed=seed),
            "gates": random_tensor(n, 2 * HEADS, seed=seed + 1),
        }
        metadata = self.backend.attention_metadata(batch, 1, self.states[0])
        (out,) = self.compiled(StepInput(tensors, {0: metadata}), ["out"])
        found: Tensor = out
        return found

    def filled(self) -> None:
        self.run(batch_of_spans(PROMPTS), 50)


def _spans(steps: int) -> list[tuple[int, int, list[int]]]:
    """The next tokens of all sequences, so many steps later."""
    return [(done + steps, 1, blocks) for done, _, blocks in SINGLE]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_steps_of_single_tokens_are_captured(kv_dtype: torch.dtype) -> None:
    """Rows that fill a step up write no state, and states lie where those of the reference do."""
    device = CountingDevice()
    own, expected = Layer.on(GpuBackend(device), kv_dtype), Layer.on(ReferenceBackend(), kv_dtype)
    for layer in (own, expected):
        layer.filled()
    found = []
    for step in range(4):
        batch = batch_of_spans(_spans(step))
        found.append([layer.run(batch, step) for layer in (own, expected)])
    assert (device.num_captured, device.num_replayed) == (1, 0)  # it is late
    for one, wanted in found:
        torch.testing.assert_close(one.cpu(), wanted, atol=1e-5, rtol=1e-5)
    assert device.num_replayed == 3
    others = [block for block in range(NUM_BLOCKS) if block not in WRITTEN]
    for ours, theirs in zip(_halves(own), _halves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)
        assert ours[others].isnan().all()


def _halves(layer: Layer) -> Sequence[Tensor]:
    return layer.states[0].halves()


def test_drafts_leave_the_states_of_the_reference() -> None:
    """The states behind tokens that are known, those of a sequence without drafts beside, and no others."""
    own, expected = Layer.on(GpuBackend(CountingDevice())), Layer.on(ReferenceBackend())
    spans = [(done, 3, blocks) for done, _, blocks in SINGLE]
    lens = torch.tensor([2, 0, *[1] * (len(spans) - 2)])
    batch = replace(batch_of_spans(spans), draft_lens=lens)
    for layer in (own, expected):
        layer.filled()
    found, wanted = own.run(batch, 3).cpu(), expected.run(batch, 3)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(_halves(own), _halves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_captured_steps_have_the_bits_of_a_prompt() -> None:
    steps, whole = Layer.on(GpuBackend(CountingDevice())), Layer.on(GpuBackend(CountingDevice()))
    inputs = random_tensor(20, CHANNELS + 2 * HEADS)

    def computed(layer: Layer, first: int, count: int) -> Tensor:
        batch = batch_of_spans([(first, count, [6, 0])])
        rows = inputs[first : first + count]
        tensors = {"qkv": rows[:, :CHANNELS].clone(), "gates": rows[:, CHANNELS:].clone()}
        metadata = layer.backend.attention_metadata(batch, 1, layer.states[0])
        (out,) = layer.compiled(StepInput(tensors, {0: metadata}), ["out"])
        kept: Tensor = out.cpu()
        return kept

    parts = [computed(steps, 0, 14), *(computed(steps, first, 1) for first in range(14, 20))]
    assert torch.equal(torch.cat(parts), computed(whole, 0, 20))


def test_a_snapshot_is_copied_as_a_block() -> None:
    """A sequence goes on elsewhere from a full block that has left the device, in order with the steps there."""
    layer, other = (Layer.on(GpuBackend(CountingDevice())) for _ in range(2))
    assert isinstance(layer.backend, GpuBackend)
    assert isinstance(other.backend, GpuBackend)
    stores = [each.backend.open_kv_store([each.memory]) for each in (layer, other)]
    layer.filled()
    block = memoryview(bytearray(stores[0].block_bytes))
    stores[0].read([5], [block], stores[0].computed()).wait()
    stores[1].write([7], [block], stores[1].computed()).wait()
    (own,) = layer.run(batch_of_spans([(16, 1, [5, 2])]), 3).cpu()
    (again,) = other.run(batch_of_spans([(16, 1, [7, 4])]), 3).cpu()
    assert torch.equal(again, own)
