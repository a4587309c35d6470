# SPDX-License-Identifier: Apache-2.0
"""Time of a decode step's products for 1 to 16 rows, as a multiple of that for one row, for every weight format.

`python -m benchmarks.cpu.rows [--formats int8 q4_k] [--rows 1 4 8] [--threads N] [--isa NAME]`. The products of
layers of Qwen3-0.6B, with norms and gates between them and no attention, in one recorded step; so many layers
that their weights come from memory. Numbers of rows take turns, and every figure is a median.

Beside each t(M)/t(1) stands the least that it can be: weights are read once whatever M is, at the bandwidth of
memory, and M rows are multiplied no faster than 256 rows are, out of the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch
from cyclopts import App, Parameter

from benchmarks.cpu.held_weights import held_weight
from benchmarks.cpu.limits import Limits, median_seconds, start
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.weights import PackedLinear
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.single import bind
from pagoda.backend.weights import BlockWeight, LinearWeight, weight_bytes
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.cli import output
from pagoda.plugins.backend_check.products import random_codes

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
_HIDDEN, _QKV, _INNER = 1024, 4096, 3072
_SHAPES = ((_QKV, _HIDDEN), (_HIDDEN, _QKV // 2), (2 * _INNER, _HIDDEN), (_HIDDEN, _INNER))
_STREAMED_BYTES = 2**28
_ON_LOAD = {"bf16": "none", "int8": "int8", "int4": "int4"}
_MANY = 256
"""Rows at which arithmetic is the limit."""

_Several = Parameter(consume_multiple=True, negative=())
_app = App()


@_app.default
def main(
    *,
    formats: Annotated[tuple[str, ...], _Several] = (*_ON_LOAD, *BLOCKS),
    rows: Annotated[tuple[int, ...], _Several] = ROWS,
    threads: int | None = None,
    isa: str | None = None,
) -> None:
    """Measures.

    Args:
        formats: Of weights: bf16, int8, int4, or a format of GGUF in lower or upper case.
        rows: The numbers of rows; the first is what others are compared with.
        threads: By default all usable cores.
        isa: Instruction set; by default the highest.
    """
    with torch.inference_mode():
        ops, limits = start(threads, isa)
        columns = ("weights", "GB/s", "of bandwidth", "limit", *(f"{n} rows" for n in rows[1:]))
        title = f"t(M) / t({rows[0]}), least possible behind it"
        table = (_curve(ops, limits, name, rows) for name in formats)
        output.stdout().print(output.table(title, columns, table))


def _curve(ops: CpuBackend, limits: Limits, name: str, rows: tuple[int, ...]) -> tuple[str, ...]:
    weights = [_weight(ops, name, *shape) for shape in _SHAPES]
    layer_bytes = sum(weight_bytes(weight, torch.bfloat16) for weight in weights)
    copies = -(-_STREAMED_BYTES // layer_bytes)
    layers = [
        [ops.prepare_linear([weight], None, torch.bfloat16) for weight in weights]
        for _ in range(copies)
    ]
    first, *others = median_seconds(*(_step(ops, layers, n) for n in rows))
    (many,) = median_seconds(_step(ops, layers[:1], _MANY))
    moved = copies * layer_bytes / first
    reading, multiplying = copies * layer_bytes / limits.bytes_per_s, copies * many / _MANY
    return (
        name,
        f"{moved / 1e9:.1f}",
        f"{moved / limits.bytes_per_s:.0%}",
        f"{2 * _MANY * sum(o * i for o, i in _SHAPES) / many / 1e9:.0f} GOP/s",
        *(
            f"{seconds / first:.2f} ({max(reading, n * multiplying) / first:.2f})"
            for n, seconds in zip(rows[1:], others, strict=True)
        ),
    )


def _weight(ops: CpuBackend, name: str, outputs: int, inputs: int) -> LinearWeight:
    if name in _ON_LOAD:
        return held_weight(ops, torch.randn(outputs, inputs) * inputs**-0.5, _ON_LOAD[name])
    return _random_blocks(BLOCKS[name.upper()], outputs, inputs)


def _random_blocks(held: BlockFormat, outputs: int, inputs: int) -> BlockWeight:
    groups, blocks = (outputs, inputs // held.group_size), (outputs, inputs // held.block_size)
    codes = random_codes(held, outputs, inputs, torch.Generator().manual_seed(0))
    step = inputs**-0.5 / 2**held.bits
    if not held.integer_scales:
        scales = torch.full(groups, step, dtype=torch.float16)
        return BlockWeight(held, codes, scales, -8 * scales if held.minima else None, None, None)
    scales = torch.randint(1, 16, groups, dtype=torch.int8) | 1
    units = torch.full(blocks, step / 8, dtype=torch.float16)
    minima, of_minima = (scales, -8 * units) if held.minima else (None, None)
    return BlockWeight(held, codes, scales, minima, units, of_minima)


def _step(ops: CpuBackend, layers: list[list[PackedLinear]], rows: int) -> Callable[[], Any]:
    norm = torch.ones(_HIDDEN)

    def record(ops: GraphBuilder, x: Value) -> Value:
        for qkv, out, gate_up, down in layers:
            x = ops.linear(ops.silu_and_mul(ops.linear(ops.rms_norm(x, norm, 1e-6), qkv)), out)
            x = ops.linear(ops.silu_and_mul(ops.linear(ops.rms_norm(x, norm, 1e-6), gate_up)), down)
        return x

    return bind(ops, record, {"x": torch.randn(rows, _HIDDEN)})


if __name__ == "__main__":
    _app()
