# SPDX-License-Identifier: Apache-2.0
"""Limits of a GPU, measured right before what is compared with them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_cuda: Any = torch.cuda
"""Type checkers know too little of it."""
_COPIED_BYTES = 2**31
_ROWS = 8192
_ROUNDS = 20


@dataclass(frozen=True)
class Limits:
    name: str
    bytes_per_s: float
    """Copying memory on the device; reads and writes count."""
    flops: float
    """Products of bf16 matrices of 8192 by 8192, by torch."""

    def __str__(self) -> str:
        return f"{self.name}: {self.bytes_per_s / 1e9:.0f} GB/s, {self.flops / 1e12:.0f} TFLOP/s in bf16"


def measure_limits() -> Limits:
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source))
    bytes_per_s = 2 * _COPIED_BYTES / seconds
    one, other = (torch.randn(_ROWS, _ROWS, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    seconds = median_seconds(lambda: torch.mm(one, other))
    return Limits(_cuda.get_device_name(), bytes_per_s, 2 * _ROWS**3 / seconds)


def median_seconds(run: Callable[[], object]) -> float:
    """Seconds on the device, of which the first rounds do not count."""
    times = []
    for _ in range(_ROUNDS):
        began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    middle: float = statistics.median(times[_ROUNDS // 4 :])
    return middle
