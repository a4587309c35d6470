# SPDX-License-Identifier: Apache-2.0
"""Time of a step's sampling, from rows of logits to tokens that are remembered.

`python -m benchmarks.cpu.sampler [--vocab 256] [--threads 1]`, for 1, 16 and 64 requests with each setting. With a
small vocabulary nearly all of it is work for each request, not for each token of the vocabulary.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch
from cyclopts import App

from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.cli import output
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart
from pagoda.worker.sampler import Sampler

SETTINGS: dict[str, dict[str, Any]] = {
    "T 1": {"temperature": 1.0},
    "T .6, top-p .95, top-k 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "greedy": {"temperature": 0.0},
    "T 1, 5 log-probabilities": {"temperature": 1.0, "logprobs": 5},
    "T 1, presence penalty": {"temperature": 1.0, "presence_penalty": 0.5},
}
_app = App()


@_app.default
def main(
    *,
    vocab: int = 256,
    threads: int = 1,
    counts: tuple[int, ...] = (1, 16, 64),
    steps: int = 1000,
) -> None:
    """Measures, and prints medians and minima.

    Args:
        vocab: Tokens of the vocabulary.
        threads: Threads that sample.
        counts: Requests of a step.
        steps: Steps of each setting.
    """
    torch.set_num_threads(threads)
    backend = CpuBackend(choose_instruction_set())
    rows = [
        (name, *(_measure(backend, vocab, count, steps, setting) for count in counts))
        for name, setting in SETTINGS.items()
    ]
    columns = ("setting", *(f"{count} requests" for count in counts))
    output.stdout().print(output.table("", columns, rows))


@torch.inference_mode()
def _measure(
    backend: CpuBackend, vocab: int, count: int, steps: int, setting: dict[str, Any]
) -> str:
    sampler = Sampler(count, vocab, backend.sample)
    for slot in range(count):
        sampling = SamplingParams(seed=slot, max_tokens=2 * steps, **setting)
        sampler.start(SlotStart(slot, [1, 2, 3], 3, 0, [[]], Work(sampling)))
    model_logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(0)) * 3
    slots, microseconds = list(range(count)), []
    for _ in range(steps):
        logits = model_logits.clone()
        began = time.perf_counter()
        sampler.needing_logits(slots)
        sampler.append(sampler.sample(logits, slots).token_ids)
        microseconds.append((time.perf_counter() - began) * 1e6)
    return f"{statistics.median(microseconds):.1f} µs ({min(microseconds):.1f})"


if __name__ == "__main__":
    _app()
