"""A worker's steps without the engine: prompts of 256 tokens, then one token for each of 1, 4 and 16 requests.

`python -m benchmarks.cpu.steps [--model qwen3-0.6b] [--dtype bfloat16]`. Beside each is the share of the machine's
limit, measured in the same minute: memory for decoding (weights and cached keys and values, read once), matrix
products for prompts.
"""

from __future__ import annotations

import os
import statistics
import time

# Read when torch is loaded: threads wait as they do in a worker.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch
from cyclopts import App

from pagoda.cli import output
from pagoda.engine.messages import SamplingParams, SlotStart, StepPlan, WorkerConfig
from pagoda.ipc.machine import available_cores
from pagoda.worker.loading import load_runner
from pagoda.worker.runner import Runner

_PROMPT, _BLOCK_SIZE, _BLOCKS = 256, 16, 24
_DECODE_STEPS, _ROUNDS = 24, 5
_app = App()


@_app.default
def main(
    *,
    model: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    quantization: str = "none",
    threads: int | None = None,
) -> None:
    """Measures.

    Args:
        model: A shape preset.
        dtype: Of weights and activations.
        threads: By default all usable cores.
    """
    config = WorkerConfig(
        model=model,
        load_format="dummy",
        dtype=dtype,
        quantization=quantization,
        max_model_len=_BLOCKS * _BLOCK_SIZE,
        max_num_seqs=17,
        num_blocks=17 * _BLOCKS,
        num_threads=threads or available_cores(),
    )
    began = time.perf_counter()
    runner, ready = load_runner(config)
    output.stdout().print(f"{ready.summary}; loaded in {time.perf_counter() - began:.1f} s")
    steps = _Steps(runner)
    prefill = statistics.median(steps.prefill(slot) for slot in range(16))
    output.stdout().print(
        f"prompt of {_PROMPT}: {prefill * 1e3:.1f} ms, {_PROMPT / prefill:.0f} tokens/s"
    )
    for count in (1, 4, 16):
        seconds = statistics.median(steps.decode(count) for _ in range(_DECODE_STEPS))
        output.stdout().print(
            f"decode of {count}: {seconds * 1e3:.1f} ms, {count / seconds:.1f} tokens/s"
        )


class _Steps:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._step = 0

    def prefill(self, slot: int) -> float:
        tokens = torch.randint(1000, (_PROMPT,)).tolist()
        start = SlotStart(
            slot=slot,
            request_id=str(slot),
            token_ids=tokens,
            num_prompt_tokens=_PROMPT,
            num_computed_tokens=0,
            block_ids=list(range(slot * _BLOCKS, (slot + 1) * _BLOCKS)),
            sampling=SamplingParams(temperature=0, seed=0, max_tokens=10_000),
        )
        return self._run([start], [slot], [_PROMPT])

    def decode(self, count: int) -> float:
        return self._run([], list(range(count)), [1] * count)

    def _run(self, starts: list[SlotStart], slots: list[int], num_tokens: list[int]) -> float:
        plan = StepPlan(step=self._step, slots=slots, num_tokens=num_tokens, starts=starts)
        self._step += 1
        began = time.perf_counter()
        self._runner.step(plan)
        return time.perf_counter() - began


if __name__ == "__main__":
    _app()
