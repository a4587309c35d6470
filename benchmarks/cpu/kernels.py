# SPDX-License-Identifier: Apache-2.0
"""Each CPU kernel beside the limit of the machine, measured in the same minute, and beside PyTorch.

`python -m benchmarks.cpu.kernels [--threads N] [--isa NAME]`. Shapes are those of Qwen3-0.6B; of latent attention,
in which 16 heads read the same vectors, those of DeepSeek-V2-Lite. Weights and caches
are larger than the processor's caches, so that they come from memory, as in a decoding step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch
import torch.nn.functional as F
from cyclopts import App

from benchmarks.cpu.held_weights import held_weight
from benchmarks.cpu.limits import Limits, median_seconds, start
from pagoda.backend.base import HeadNorms, KVCache, LatentCache, TokenBatch
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.weights import PackedLinear
from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.host import rotary_table
from pagoda.backend.latent_layers import latent_attention
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.single import bind
from pagoda.backend.weights import DenseWeight, LinearWeight
from pagoda.cli import output

_STREAMED_BYTES = 2**28
_SHAPES = ((4096, 1024), (6144, 1024), (1024, 3072))
_ROWS = (1, 4, 8, 16, 64, 256)
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 16, 8, 128, 16
_RANK, _ROPE_DIM = 512, 64
_TOKENS = 8192
_CONTEXTS = (1024, 4096, 16384, 32768)
_KV_DTYPES = (torch.bfloat16, torch.int8, torch.float16)

_T = TypeVar("_T")
_C = TypeVar("_C", KVCache, LatentCache)
_app = App()


@_app.default
def main(*, threads: int | None = None, isa: str | None = None) -> None:
    """Measures.

    Args:
        threads: By default all usable cores.
        isa: Instruction set; by default the highest.
    """
    console = output.stdout()
    with torch.inference_mode():
        ops, limits = start(threads, isa)
        head = ("kernel", "dtype", "rows", "GB/s", "GFLOP/s", "of the limit", "of PyTorch")
        console.print(output.table("Linear", head, _linear_rows(ops, limits)))
        head = ("kernel", "weights", "rows", "GB/s", "GOP/s", "of the limit", "of own bf16")
        console.print(output.table("Linear, quantized", head, _quantized_rows(ops, limits)))
        titles = ("kernel", "tokens", "GB/s", "of the limit")
        console.print(output.table("Token by token", titles, _token_rows(ops, limits)))
        columns = ("step", "KV cache", "context", "GB/s", "GFLOP/s", "of the limit")
        for title, steps in (("Attention", _steps()), ("Latent attention", _latent_steps())):
            console.print(output.table(title, columns, _attention_rows(ops, limits, steps)))


def _each(operation: Callable[[_T], object], arguments: Iterable[_T]) -> None:
    for argument in arguments:
        operation(argument)


def _products(
    ops: CpuBackend, x: torch.Tensor, weights: Sequence[PackedLinear]
) -> Callable[[], None]:
    """Multiplies x by one weight after the other."""

    def product(weight: PackedLinear) -> Callable[[], object]:
        return bind(ops, lambda ops, x: ops.linear(x, weight), {"x": x})

    return partial(_each, lambda multiply: multiply(), [*map(product, weights)])


def _linear_rows(ops: CpuBackend, limits: Limits) -> Iterable[tuple[str, ...]]:
    for dtype in (torch.bfloat16, torch.float32):
        for outputs, inputs in _SHAPES:
            count = -(-_STREAMED_BYTES // (outputs * inputs * dtype.itemsize))
            weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
            packed = [
                ops.prepare_linear([DenseWeight(weight)], None, weight.dtype) for weight in weights
            ]
            for rows in _ROWS:
                x = torch.randn(rows, inputs)
                own, torchs = median_seconds(
                    _products(ops, x, packed),
                    partial(_each, partial(F.linear, x.to(dtype)), weights),
                )
                moved = sum(weight.nbytes for weight in weights) / own
                flops = 2 * rows * sum(weight.numel() for weight in weights) / own
                yield (
                    f"{outputs} x {inputs}",
                    str(dtype).removeprefix("torch."),
                    str(rows),
                    f"{moved / 1e9:.1f}",
                    f"{flops / 1e9:.0f}",
                    _share(moved, flops, limits) if dtype == torch.bfloat16 else "",
                    f"{torchs / own:.2f} x",
                )


def _quantized_rows(ops: CpuBackend, limits: Limits) -> Iterable[tuple[str, ...]]:
    for outputs, inputs in _SHAPES:
        stored_format = _random_weights(ops, outputs, inputs)
        packed = {name: _streamed(ops, weight) for name, weight in stored_format.items()}
        for rows in _ROWS:
            x = torch.randn(rows, inputs)
            runs = [_products(ops, x, packed[name][: _passes(rows)]) for name in stored_format]
            seconds = [
                taken / len(packed[name][: _passes(rows)])
                for name, taken in zip(stored_format, median_seconds(*runs), strict=True)
            ]
            for name, taken in list(zip(stored_format, seconds, strict=True))[1:]:
                moved = sum(part.panels.nbytes for part in packed[name][0].segments) / taken
                operations = 2 * rows * outputs * inputs / taken
                yield (
                    f"{outputs} x {inputs}",
                    name,
                    str(rows),
                    f"{moved / 1e9:.1f}",
                    f"{operations / 1e9:.0f}",
                    _share(moved, operations, limits),
                    f"{seconds[0] / taken:.2f} x",
                )


def _random_weights(ops: CpuBackend, outputs: int, inputs: int) -> dict[str, LinearWeight]:
    """bfloat16 and what `--quantization` makes of it."""
    values = torch.randn(outputs, inputs)
    return {
        "bfloat16": held_weight(ops, values, "none"),
        "int8": held_weight(ops, values, "int8"),
        "int4, groups of 128": held_weight(ops, values, "int4", 128),
        "int4": held_weight(ops, values, "int4"),
    }


def _streamed(ops: CpuBackend, weight: LinearWeight) -> list[PackedLinear]:
    """Copies that no cache holds together."""
    first = ops.prepare_linear([weight], None, torch.bfloat16)
    count = _STREAMED_BYTES // sum(part.panels.nbytes for part in first.segments)
    return [first, *(ops.prepare_linear([weight], None, torch.bfloat16) for _ in range(count))]


def _passes(rows: int) -> int | None:
    """Number of copies that a round multiplies; None for all. A few do where arithmetic takes the time."""
    return None if rows <= 16 else 8


def _keep_memory() -> None:
    """Lets results take the memory of those before, as in a recorded forward pass: new pages take longest."""
    trim_threshold, mmap_max = -1, -4  # as glibc's malloc.h numbers them
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2**31 - 1)


def _token_rows(ops: CpuBackend, limits: Limits) -> Iterable[tuple[str, ...]]:
    """Rows for so many tokens that what is read and written comes from memory."""
    _keep_memory()
    hidden, inner, heads = 1024, 3072, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
    x, delta = (torch.randn(_TOKENS, hidden) for _ in range(2))
    gate_up, qkv = (torch.randn(_TOKENS, width) for width in (2 * inner, heads))
    norm, head_norm = torch.ones(hidden), torch.ones(_HEAD_DIM)
    step = Step("", 1, _TOKENS, _TOKENS, torch.bfloat16)
    num_blocks = _TOKENS // _BLOCK_SIZE
    cache = ops.allocate_kv_cache(num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, torch.bfloat16)
    plan = ops.attention_metadata(_batch(step), _HEADS, cache)
    half = torch.linspace(1, 0.01, _HEAD_DIM // 2)
    table = rotary_table(torch.arange(_TOKENS), half, scale=1.0)
    norms = HeadNorms(head_norm, head_norm, 1e-6)

    def add_rms_norm(ops: GraphBuilder, x: Value, delta: Value) -> list[Value]:
        total = ops.add(x, delta)
        return [total, ops.rms_norm(total, norm, 1e-6)]

    def ready(
        ops: GraphBuilder, qkv: Value, metadata: Value, cosines: Value, sines: Value
    ) -> Value:
        table = RotaryTable(cosines, sines)
        return ops.rotate_and_cache(
            qkv, metadata, table, cache, norms, num_heads=_HEADS, head_dim=_HEAD_DIM
        )

    kernels: dict[str, tuple[int, Callable[[], object]]] = {
        "residual and RMS norm": (4 * hidden, bind(ops, add_rms_norm, {"x": x, "delta": delta})),
        "SiLU and product": (3 * inner, bind(ops, GraphBuilder.silu_and_mul, {"gate_up": gate_up})),
        "QK norm, rotation, KV write": (
            2 * heads,
            bind(ops, ready, {"qkv": qkv, "cosines": table[0], "sines": table[1]}, plan),
        ),
    }
    for name, (elements, run) in kernels.items():
        (seconds,) = median_seconds(run)
        moved = _TOKENS * elements * 4 / seconds
        share = f"{moved / limits.bytes_per_s:.0%} of memory"
        yield name, str(_TOKENS), f"{moved / 1e9:.1f}", share


@dataclass(frozen=True)
class Step:
    """The attention of one layer: `num_new` tokens of each of some requests."""

    name: str
    num_requests: int
    num_new: int
    context: int
    kv_dtype: torch.dtype
    shared: int = 0
    """Tokens that all requests begin with."""
    latent: bool = False
    """True of latent attention."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        return torch.bfloat16 if self.kv_dtype == torch.int8 else self.kv_dtype

    @property
    def kv_bytes(self) -> int:
        vectors, width = (1, _RANK + _ROPE_DIM) if self.latent else (2 * _KV_HEADS, _HEAD_DIM)
        scale = 4 if self.kv_dtype == torch.int8 else 0
        vector = width * self.kv_dtype.itemsize + scale
        return self.num_blocks * _BLOCK_SIZE * vectors * vector

    @property
    def num_blocks(self) -> int:
        own = -(-self.context // _BLOCK_SIZE) - self.shared // _BLOCK_SIZE
        return self.num_requests * own + self.shared // _BLOCK_SIZE

    @property
    def flops(self) -> float:
        pairs = self.num_requests * self.num_new * (self.context - self.num_new / 2)
        widths = 2 * _RANK + _ROPE_DIM if self.latent else 2 * _HEAD_DIM
        return 2 * pairs * _HEADS * widths

    def bind(self, ops: CpuBackend, num_layers: int) -> Callable[[], object]:
        """The attention of so many layers, one after the other."""
        return _bind_latent(ops, self, num_layers) if self.latent else _bind(ops, self, num_layers)


def _steps() -> Iterable[Step]:
    for kv_dtype in _KV_DTYPES:
        for context in _CONTEXTS:
            yield Step("decode, 1 request", 1, 1, context, kv_dtype)
        for context in (300, 1024):
            yield Step("decode, 16 requests", 16, 1, context, kv_dtype)
        yield Step("decode, 16 requests that share 2,048 tokens", 16, 1, 2304, kv_dtype, 2048)
        for context in _CONTEXTS:
            yield Step("prompt chunk of 256", 1, 256, context, kv_dtype)
        yield Step("prompt", 1, 2048, 2048, kv_dtype)


def _latent_steps() -> Iterable[Step]:
    for kv_dtype in (torch.bfloat16, torch.int8):
        for context in (4096, 32768):
            yield Step("decode, 1 request", 1, 1, context, kv_dtype, latent=True)
            yield Step("decode, 16 requests", 16, 1, context, kv_dtype, latent=True)
        name = "decode, 16 requests that share 2,048 tokens"
        yield Step(name, 16, 1, 2304, kv_dtype, 2048, latent=True)
        yield Step("prompt", 1, 2048, 2048, kv_dtype, latent=True)


def _attention_rows(
    ops: CpuBackend, limits: Limits, steps: Iterable[Step]
) -> Iterable[tuple[str, ...]]:
    for step in steps:
        seconds = _attention_seconds(ops, step)
        moved, flops = step.kv_bytes / seconds, step.flops / seconds
        yield (
            step.name,
            str(step.kv_dtype).removeprefix("torch."),
            str(step.context),
            f"{moved / 1e9:.1f}",
            f"{flops / 1e9:.0f}",
            _share(moved, flops, limits),
        )


def _attention_seconds(ops: CpuBackend, step: Step) -> float:
    """Seconds of one layer, whose cache was not read lately: layers follow one another, as in a worker's step."""
    num_layers = 2 if step.num_new > 1 else max(1, _STREAMED_BYTES // step.kv_bytes)
    (seconds,) = median_seconds(step.bind(ops, num_layers))
    return seconds / num_layers


def _bind(ops: CpuBackend, step: Step, num_layers: int) -> Callable[[], object]:
    shape = (step.num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, step.dtype, step.kv_dtype)
    caches = [_filled(ops.allocate_kv_cache(*shape)) for _ in range(num_layers)]

    def attend(ops: GraphBuilder, queries: Value, metadata: Value) -> Value:
        for cache in caches:
            queries = ops.attention(
                queries,
                metadata,
                cache,
                head_dim=_HEAD_DIM,
                scale=_HEAD_DIM**-0.5,
                window=None,
            )
        return queries

    queries = torch.randn(step.num_requests * step.num_new, _HEADS * _HEAD_DIM)
    metadata = ops.attention_metadata(_batch(step), _HEADS, caches[0])
    return bind(ops, attend, {"queries": queries}, metadata)


def _bind_latent(ops: CpuBackend, step: Step, num_layers: int) -> Callable[[], object]:
    shape = (step.num_blocks, _BLOCK_SIZE, _RANK, _ROPE_DIM, step.dtype, step.kv_dtype)
    caches = [_filled(ops.allocate_latent_cache(*shape)) for _ in range(num_layers)]

    def attend(ops: GraphBuilder, queries: Value, rotary: Value, metadata: Value) -> Value:
        for cache in caches:
            queries = latent_attention(ops, queries, rotary, metadata, cache, scale=0.1)
        return queries

    widths = {"queries": _HEADS * _RANK, "rotary": _HEADS * _ROPE_DIM}
    num_tokens = step.num_requests * step.num_new
    tensors = {name: torch.randn(num_tokens, width) for name, width in widths.items()}
    metadata = ops.attention_metadata(_batch(step), _HEADS, caches[0])
    return bind(ops, attend, tensors, metadata)


def _filled(cache: _C) -> _C:
    """The cache with random numbers, which scales, if it has any, make about as large as those of no scale."""
    for name, part in cache.tensors.items():
        if name.endswith("scales"):
            part.fill_(1 / 40)
        elif part.is_floating_point():
            part.normal_()
        else:
            part.random_(-127, 128)
    return cache


def _batch(step: Step) -> TokenBatch:
    lens = torch.full((step.num_requests,), step.num_new)
    num_tokens = step.num_requests * step.num_new
    positions = torch.arange(step.context - step.num_new, step.context)
    blocks, num_shared = torch.randperm(step.num_blocks), step.shared // _BLOCK_SIZE
    shared, own = blocks[:num_shared], blocks[num_shared:]
    prefix = shared.expand(step.num_requests, -1)
    return TokenBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=positions.repeat(step.num_requests),
        sequence_ids=torch.repeat_interleave(lens),
        query_lens=lens,
        context_lens=torch.full_like(lens, step.context),
        block_tables=(torch.cat((prefix, own.view(step.num_requests, -1)), dim=1),),
    )


def _share(bytes_per_s: float, flops: float, limits: Limits) -> str:
    """Share of the nearer limit: memory or arithmetic."""
    memory, arithmetic = bytes_per_s / limits.bytes_per_s, flops / limits.flops
    name = "memory" if memory > arithmetic else "arithmetic"
    return f"{max(memory, arithmetic):.0%} of {name}"


if __name__ == "__main__":
    _app()
