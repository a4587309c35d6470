# SPDX-License-Identifier: Apache-2.0
"""Decode steps of a worker with each setting of sampling in turn, for 1, 16 and 32 requests.

`python -m benchmarks.cpu.sampling [--model qwen3-0.6b] [--dtype bfloat16] [--quantization int8]`. Weights are
random, so distributions are flat: the slow case, in which nearly all tokens count. `--peaked` raises every 997th
logit, as far as a sure model does. Settings take turns, and each is compared with the greedy steps beside it.
"""

from __future__ import annotations

import os
import statistics
import time

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch
from cyclopts import App
from rich.table import Table

from benchmarks.cpu.dummy_runner import load_dummy
from pagoda.cli import output
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.worker.runner import Runner

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "T 1": {"temperature": 1.0},
    "T .7, top-p .8, top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "T .8, top-p .95": {"temperature": 0.8, "top_p": 0.95},
    "min-p .05, repetition 1.1": {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
    "greedy, 5 log-probabilities": {"temperature": 0.0, "logprobs": 5},
    "T 1, typical-p .9": {"temperature": 1.0, "typical_p": 0.9},
}
_PROMPT, _BLOCK_SIZE, _BLOCKS = 32, 16, 24
_app = App()


@_app.default
def main(
    *,
    model: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    quantization: str = "none",
    counts: tuple[int, ...] = (1, 16, 32),
    rounds: int = 12,
    peaked: bool = False,
    threads: int | None = None,
) -> None:
    """Measures.

    Args:
        model: A shape preset.
        dtype: Of weights and activations.
        quantization: Of weights: none, int8 or int4.
        counts: Requests of a step.
        rounds: Steps with each setting.
        peaked: Raise some logits far above the others.
        threads: By default all usable cores.
    """
    runner, ready, *_ = load_dummy(
        model,
        dtype,
        quantization,
        threads,
        max_model_len=_BLOCKS * _BLOCK_SIZE,
        max_num_seqs=max(counts),
        num_blocks=max(counts) * _BLOCKS,
    )
    assert isinstance(runner, Runner)
    if peaked:
        _raise_some_logits(runner)
    console = output.stdout()
    console.print(ready.summary)
    table = Table("setting", *(f"{count} requests" for count in counts))
    columns = [_measure(runner, count, rounds) for count in counts]
    for name in SETTINGS:
        cells = []
        for seconds in columns:
            ratios = [
                own / greedy for own, greedy in zip(seconds[name], seconds["greedy"], strict=True)
            ]
            median = statistics.median(seconds[name])
            cells.append(f"{median * 1e3:.2f} ms, × {statistics.median(ratios):.3f}")
        table.add_row(name, *cells)
    console.print(table)


def _raise_some_logits(runner: Runner) -> None:
    """Makes the runner's distributions peaked."""
    compute = runner.model.logits

    def raised(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[:, ::997] += torch.arange(len(logits[0, ::997]), 0, -1).sqrt()
        return logits

    runner.model.logits = raised  # type: ignore[method-assign]


def _measure(runner: Runner, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the steps of each setting; all begin with the same prompts."""
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    step = 0
    for turn in range(rounds + 1):
        for name, setting in SETTINGS.items():
            starts = [_start(slot, setting) for slot in range(count)]
            slots = list(range(count))
            prompts = StepPlan(step=step, slots=slots, num_tokens=[_PROMPT] * count, starts=starts)
            runner.submit(prompts).result()
            best = []
            for _ in range(3):
                step += 1
                plan = StepPlan(step=step, slots=slots, num_tokens=[1] * count)
                began = time.perf_counter()
                runner.submit(plan).result()
                best.append(time.perf_counter() - began)
            end = StepPlan(step=step + 1, slots=[], num_tokens=[], freed_slots=slots)
            runner.submit(end).result()
            step += 2
            if turn > 0:  # the first time memory is taken
                seconds[name].append(statistics.median(best))
    return seconds


def _start(slot: int, setting: dict[str, float]) -> SlotStart:
    generator = torch.Generator().manual_seed(slot)
    return SlotStart(
        slot=slot,
        request_id=str(slot),
        token_ids=torch.randint(1000, (_PROMPT,), generator=generator).tolist(),
        num_prompt_tokens=_PROMPT,
        num_computed_tokens=0,
        block_ids=[list(range(slot * _BLOCKS, (slot + 1) * _BLOCKS))],
        work=Work(SamplingParams(seed=slot, max_tokens=10_000, **setting)),  # type: ignore[arg-type]
    )


if __name__ == "__main__":
    _app()
