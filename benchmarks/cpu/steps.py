# SPDX-License-Identifier: Apache-2.0
"""A worker's steps without the engine: prompts of 256 tokens, then one token for each of 1, 4 and 16 requests.

Then one for each of 16 in a step with a prompt, a prompt of 2,048 tokens in chunks of 512, and one token for each
of 16 whose prompts begin with it.

`python -m benchmarks.cpu.steps [--model qwen3-0.6b] [--dtype bfloat16] [--quantization int8]`. Beside each is the
share of the machine's limit, measured in the same minute: memory for decoding (weights and cached keys and values,
read once), bf16 products of matrices for prompts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch
from cyclopts import App

from benchmarks.cpu.dummy_runner import load_dummy
from benchmarks.cpu.limits import measure_limits
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.presets import PRESETS
from pagoda.cli import output
from pagoda.cli.weight_traffic import weight_traffic
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.worker.runner import Runner, StageRunner

_PROMPT, _BLOCK_SIZE, _BLOCKS = 256, 16, 24
_SHARED, _CHUNK = 2048, 512
_DECODE_STEPS = 24
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
        quantization: Of weights: none, int8 or int4.
        threads: By default all usable cores.
    """
    began = time.perf_counter()
    runner, ready, *_ = load_dummy(
        model,
        dtype,
        quantization,
        threads,
        max_model_len=_BLOCKS * _BLOCK_SIZE + _SHARED,
        max_num_seqs=17,
        num_blocks=17 * _BLOCKS + _SHARED // _BLOCK_SIZE,
    )
    console = output.stdout()
    console.print(f"{ready.summary}; loaded in {time.perf_counter() - began:.1f} s")
    with torch.inference_mode():
        limits = measure_limits(CpuBackend(choose_instruction_set()))
    console.print(f"the machine {limits}")
    steps, cost = _Steps(runner), _Cost(model, dtype, quantization)
    # Memory of the cache is taken when it is first written; that is not part of a step.
    for slot in range(16):
        steps.prefill(slot)
    seconds = statistics.median(steps.prefill(slot) for slot in range(16))
    console.print(
        f"prompt of {_PROMPT}: {seconds * 1e3:.1f} ms, {_PROMPT / seconds:.0f} tokens/s, "
        f"{cost.prompt_flops(_PROMPT) / seconds / limits.flops:.0%} of the arithmetic"
    )
    for count in (1, 4, 16):
        seconds = statistics.median(steps.decode(count) for _ in range(_DECODE_STEPS))
        moved = cost.weight_bytes + count * steps.context(count) * cost.kv_bytes_per_token
        console.print(
            f"decode of {count}: {seconds * 1e3:.1f} ms, {count / seconds:.1f} tokens/s, "
            f"{moved / seconds / limits.bytes_per_s:.0%} of the bandwidth"
        )
    rounds = [
        (steps.decode(16), steps.prefill(16), steps.mixed()) for _ in range(_DECODE_STEPS // 3)
    ]
    decode, prefill, mixed = (statistics.median(column) for column in zip(*rounds, strict=True))
    console.print(
        f"decode of 16 and prompt of {_PROMPT}: {mixed * 1e3:.1f} ms in one step, "
        f"{(decode + prefill) * 1e3:.1f} ms in two"
    )
    seconds = steps.share_prefix()
    console.print(
        f"prompt of {_SHARED} in chunks of {_CHUNK}: {seconds * 1e3:.0f} ms, {_SHARED / seconds:.0f} tokens/s, "
        f"{cost.prompt_flops(_SHARED) / seconds / limits.flops:.0%} of the arithmetic"
    )
    seconds = statistics.median(steps.decode(16) for _ in range(_DECODE_STEPS))
    console.print(f"decode of 16 that share {_SHARED} tokens: {seconds * 1e3:.1f} ms")


class _Cost:
    """Least work of a step."""

    def __init__(self, model: str, dtype: str, quantization: str) -> None:
        shape = parse_model_config(PRESETS[model], source=model)
        itemsize = getattr(torch, dtype).itemsize
        self.weight_bytes = weight_traffic(shape, dtype, quantization).num_bytes
        self.kv_bytes_per_token = (
            2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize
        )
        dense = weight_traffic(shape, dtype).num_bytes // itemsize
        # Only the last token of a prompt goes through the head and what is behind the last layer's attention.
        last = shape.num_layers - 1
        behind = [*filter(None, (shape.attention_linears(last).out,))]
        if shape.expert_linears(last) is None:
            behind += shape.mlp_linears(last)
        spared = shape.vocab_size * shape.hidden_size + sum(e.outputs * e.inputs for e in behind)
        self._row_weights: int = dense - spared
        self._last_weights: int = spared
        self._attended: int = shape.num_layers * shape.num_heads * shape.head_dim

    def prompt_flops(self, num_tokens: int) -> int:
        """Operations of products with weights, and of scores and values under the causal mask."""
        products = num_tokens * self._row_weights + self._last_weights
        return 2 * (products + num_tokens * (num_tokens + 1) * self._attended)


class _Steps:
    def __init__(self, runner: Runner | StageRunner) -> None:
        self._runner = runner
        self._step = 0
        self._decoded: list[int] = [0] * 16
        self._used: set[int] = set()

    def prefill(self, slot: int) -> float:
        """Frees the slot, computes a new prompt in it and returns the seconds of that step."""
        self._free_used([slot])
        return self._run([self._start(slot, _PROMPT)], [slot], [_PROMPT])

    def mixed(self) -> float:
        """A token for each of 16, and a prompt in the slot behind them."""
        self._free_used([16])
        for slot in range(16):
            self._decoded[slot] += 1
        return self._run([self._start(16, _PROMPT)], list(range(17)), [*[1] * 16, _PROMPT])

    def share_prefix(self) -> float:
        """Seconds of a prompt of `_SHARED` tokens; computes `_PROMPT` more for each of 16 that begin with it."""
        self._free_used(range(17))
        prefix = torch.randint(1000, (_SHARED,)).tolist()
        blocks = list(range(17 * _BLOCKS, 17 * _BLOCKS + _SHARED // _BLOCK_SIZE))
        start = self._start(16, 0, prefix, blocks)
        seconds = sum(
            self._run([start] if first == 0 else [], [16], [_CHUNK])
            for first in range(0, _SHARED, _CHUNK)
        )
        for slot in range(16):
            self._run([self._start(slot, _PROMPT, prefix, blocks, _SHARED)], [slot], [_PROMPT])
        return seconds

    def _start(
        self,
        slot: int,
        num_new: int,
        prefix: Sequence[int] = (),
        prefix_blocks: Sequence[int] = (),
        num_computed: int = 0,
    ) -> SlotStart:
        self._used.add(slot)
        return SlotStart(
            slot=slot,
            request_id=str(slot),
            token_ids=[*prefix, *torch.randint(1000, (num_new,)).tolist()],
            num_prompt_tokens=len(prefix) + num_new,
            num_computed_tokens=num_computed,
            block_ids=[[*prefix_blocks, *range(slot * _BLOCKS, (slot + 1) * _BLOCKS)]],
            work=Work(SamplingParams(temperature=0, seed=0, max_tokens=10_000)),
        )

    def decode(self, count: int) -> float:
        for slot in range(count):
            self._decoded[slot] += 1
        return self._run([], list(range(count)), [1] * count)

    def _free_used(self, slots: Iterable[int]) -> None:
        freed = sorted(self._used.intersection(slots))
        self._used.difference_update(freed)
        self._run([], [], [], freed=freed)

    def context(self, count: int) -> float:
        """Tokens of a request behind the last step, on average over the first `count`."""
        return _PROMPT + statistics.mean(self._decoded[:count])

    def _run(
        self,
        starts: list[SlotStart],
        slots: list[int],
        num_tokens: list[int],
        freed: list[int] | None = None,
    ) -> float:
        plan = StepPlan(
            step=self._step,
            slots=slots,
            num_tokens=num_tokens,
            starts=starts,
            freed_slots=freed or [],
        )
        self._step += 1
        began = time.perf_counter()
        self._runner.submit(plan).result()
        return time.perf_counter() - began


if __name__ == "__main__":
    _app()
