"""Each CPU kernel beside the limit of the machine, measured in the same minute, and beside PyTorch.

`python -m benchmarks.cpu.kernels [--threads N] [--isa NAME]`. Shapes are those of Qwen3-0.6B. Weights and caches
are larger than the processor's caches, so that they come from memory, as in a decoding step.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

# Read when torch is loaded: threads wait as they do in a worker.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from cyclopts import App
from torch import Tensor

from pagoda.backend.base import TokenBatch
from pagoda.backend.cpu import CpuBackend, choose_instruction_set
from pagoda.backend.weights import DenseWeight
from pagoda.cli import output
from pagoda.cli.bandwidth import measure_read_bandwidth
from pagoda.ipc.machine import available_cores, available_memory_bytes

_ROUNDS = 9
_STREAMED_BYTES = 2**28
_SHAPES = ((4096, 1024), (6144, 1024), (1024, 3072))
_ROWS = (1, 4, 16, 64, 256)
_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 16, 8, 128, 16
_CONTEXTS = (1024, 4096, 16384, 32768)

_T = TypeVar("_T")
_app = App()


@dataclass(frozen=True)
class Limits:
    bytes_per_s: float
    flops: float


@_app.default
def main(*, threads: int | None = None, isa: str | None = None) -> None:
    """Measures.

    Args:
        threads: By default all usable cores.
        isa: Instruction set; by default the highest.
    """
    torch.set_num_threads(threads or available_cores())
    ops = CpuBackend(isa or choose_instruction_set())
    console = output.stdout()
    with torch.inference_mode():
        limits = _limits(ops)
        console.print(
            f"{ops.summary}: reads {limits.bytes_per_s / 1e9:.1f} GB/s from memory, multiplies "
            f"{limits.flops / 1e9:.0f} GFLOP/s in bf16 (256 rows by 8192 x 4096)"
        )
        head = ("kernel", "dtype", "rows", "GB/s", "GFLOP/s", "of the limit", "of PyTorch")
        console.print(output.table("Linear", head, _linear_rows(ops, limits)))
        columns = ("kernel", "context", "GB/s", "GFLOP/s", "of the limit")
        console.print(output.table("Attention, bf16", columns, _attention_rows(ops, limits)))


def _median_seconds(*runs: Callable[[], object]) -> list[float]:
    """Of each, in turn, so that what else the machine does falls on all alike."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(_ROUNDS):
        for run, taken in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def _each(operation: Callable[[_T], object], arguments: Iterable[_T]) -> None:
    for argument in arguments:
        operation(argument)


def _limits(ops: CpuBackend) -> Limits:
    x, weight = torch.randn(256, 4096).bfloat16(), torch.randn(8192, 4096).bfloat16()
    packed = ops.prepare_linear([DenseWeight(weight)], None, weight.dtype)
    seconds = min(_median_seconds(lambda: ops.linear(x, packed), lambda: F.linear(x, weight)))
    bandwidth = measure_read_bandwidth(torch.get_num_threads(), available_memory_bytes())
    return Limits(bandwidth.bytes_per_s, 2 * 256 * weight.numel() / seconds)


def _linear_rows(ops: CpuBackend, limits: Limits) -> Iterable[tuple[str, ...]]:
    for dtype in (torch.bfloat16, torch.float32):
        for outputs, inputs in _SHAPES:
            count = -(-_STREAMED_BYTES // (outputs * inputs * dtype.itemsize))
            weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
            packed = [
                ops.prepare_linear([DenseWeight(weight)], None, weight.dtype) for weight in weights
            ]
            for rows in _ROWS:
                x = torch.randn(rows, inputs).to(dtype)
                own, torchs = _median_seconds(
                    partial(_each, partial(ops.linear, x), packed),
                    partial(_each, partial(F.linear, x), weights),
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


def _attention_rows(ops: CpuBackend, limits: Limits) -> Iterable[tuple[str, ...]]:
    per_token = 2 * _KV_HEADS * _HEAD_DIM * 2
    for what, num_new in (("decode, 1 request", 1), ("prompt chunk of 256", 256)):
        for context in _CONTEXTS:
            seconds = _attention_seconds(ops, context, num_new)
            moved = context * per_token / seconds
            pairs = num_new * (context - num_new / 2)
            flops = 4 * pairs * _HEADS * _HEAD_DIM / seconds
            yield (
                what,
                str(context),
                f"{moved / 1e9:.1f}",
                f"{flops / 1e9:.0f}",
                _share(moved, flops, limits),
            )


def _attention_seconds(ops: CpuBackend, context: int, num_new: int) -> float:
    """Of one layer, whose cache was not read lately: layers take turns."""
    num_layers = max(1, _STREAMED_BYTES // (context * 4096))
    num_blocks = context // _BLOCK_SIZE
    caches = [
        ops.allocate_kv_cache(num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, torch.bfloat16)
        for _ in range(num_layers)
    ]
    for cache in caches:
        cache.keys.normal_()
        cache.values.normal_()
    plan = ops.plan_attention(_one_sequence(context, num_new, num_blocks), _HEADS, caches[0])
    queries = torch.randn(num_new, _HEADS, _HEAD_DIM).bfloat16()

    def attend() -> list[Tensor]:
        scale = _HEAD_DIM**-0.5
        return [
            ops.attention(queries, cache, plan, scale=scale, window=None)
            for cache in caches[: 2 if num_new > 1 else None]
        ]

    (seconds,) = _median_seconds(attend)
    return seconds / (min(2, num_layers) if num_new > 1 else num_layers)


def _one_sequence(context: int, num_new: int, num_blocks: int) -> TokenBatch:
    return TokenBatch(
        token_ids=torch.zeros(num_new, dtype=torch.int64),
        positions=torch.arange(context - num_new, context),
        sequence_ids=torch.zeros(num_new, dtype=torch.int64),
        query_lens=torch.tensor([num_new]),
        context_lens=torch.tensor([context]),
        block_tables=torch.randperm(num_blocks)[None],
    )


def _share(bytes_per_s: float, flops: float, limits: Limits) -> str:
    """Of the limit that is nearer: memory or arithmetic."""
    memory, arithmetic = bytes_per_s / limits.bytes_per_s, flops / limits.flops
    name = "memory" if memory > arithmetic else "arithmetic"
    return f"{max(memory, arithmetic):.0%} of {name}"


if __name__ == "__main__":
    _app()
