# SPDX-License-Identifier: Apache-2.0
"""Limits of this machine, measured right before what is compared with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.backend.single import bind
from pagoda.backend.weights import DenseWeight
from pagoda.cli import output
from pagoda.cli.machine_facts import measure_read_bandwidth
from pagoda.ipc.machine import available_cores, available_memory_bytes

_ROUNDS = 9


@dataclass(frozen=True)
class Limits:
    bytes_per_s: float
    """Reading memory."""
    flops: float
    """Products of bf16 matrices: 256 rows by 8192 x 4096, with PyTorch or our own kernel, whichever is faster."""

    def __str__(self) -> str:
        return (
            f"reads {self.bytes_per_s / 1e9:.1f} GB/s from memory, multiplies "
            f"{self.flops / 1e9:.0f} GFLOP/s in bf16"
        )


def start(threads: int | None, isa: str | None) -> tuple[CpuBackend, Limits]:
    """The backend that is measured, and what the machine can do; prints both."""
    torch.set_num_threads(threads or available_cores())
    ops = CpuBackend(isa or choose_instruction_set())
    limits = measure_limits(ops)
    output.stdout().print(f"{ops.arithmetic}, {torch.get_num_threads()} threads: {limits}")
    return ops, limits


def measure_limits(ops: CpuBackend) -> Limits:
    x, weight = torch.randn(256, 4096), torch.randn(8192, 4096).bfloat16()
    rounded = x.bfloat16()
    packed = ops.prepare_linear([DenseWeight(weight)], None, weight.dtype)
    own = bind(ops, lambda ops, x: ops.linear(x, packed), {"x": x})
    seconds = min(median_seconds(own, lambda: F.linear(rounded, weight)))
    bandwidth = measure_read_bandwidth(torch.get_num_threads(), available_memory_bytes())
    return Limits(bandwidth.bytes_per_s, 2 * 256 * weight.numel() / seconds)


def median_seconds(*runs: Callable[[], object]) -> list[float]:
    """Median seconds of each run; runs take turns, so that what else the machine does falls on all alike."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(_ROUNDS):
        for run, taken in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]
