# SPDX-License-Identifier: Apache-2.0
"""Cost of adapters: steps of one token for each of 16 requests, without and with adapters of theirs, in turn.

`python -m benchmarks.cpu.adapters [--model llama-3.2-1b] [--quantization int8] [--adapters 8] [--rank 16]`. Seven
linear layers of each layer are adapted; request `i` has adapter `i % adapters`. Figures are medians of rounds
in each of which both kinds of steps are taken; a step ends with greedy sampling.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch
from cyclopts import App
from safetensors.torch import save_file

from benchmarks.cpu.dummy_runner import load_dummy
from pagoda.checkpoints.adapters import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.presets import PRESETS
from pagoda.cli import output
from pagoda.messages.adapters import Adapter
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.worker.runner import Runner, StageRunner

_REQUESTS, _PROMPT, _BLOCK_SIZE, _BLOCKS = 16, 256, 16, 24
_app = App()


@_app.default
def main(
    *,
    model: str = "llama-3.2-1b",
    dtype: str = "bfloat16",
    quantization: str = "int8",
    adapters: int = 8,
    rank: int = 16,
    rounds: int = 40,
    threads: int | None = None,
) -> None:
    """Measures.

    Args:
        model: A shape preset.
        dtype: Of dense weights, activations and adapters.
        quantization: Of weights: none, int8 or int4.
        adapters: How many requests of one step have.
        rank: Of each adapter.
        rounds: Steps of each kind.
        threads: By default all usable cores.
    """
    config = parse_model_config(PRESETS[model], source=model)
    with tempfile.TemporaryDirectory() as directory:
        made = [_save(config, Path(directory) / f"a{i}", rank, i) for i in range(adapters)]
        began = time.perf_counter()
        runner, ready, *_ = load_dummy(
            model,
            dtype,
            quantization,
            threads,
            max_model_len=_BLOCKS * _BLOCK_SIZE,
            max_num_seqs=2 * _REQUESTS,
            num_blocks=2 * _REQUESTS * _BLOCKS,
            adapters=tuple(made),
            max_lora_rank=max(rank, 64),
        )
    console = output.stdout()
    console.print(f"{ready.summary}; loaded in {time.perf_counter() - began:.1f} s")
    steps = _Steps(runner, [adapter.digest for adapter in made])
    prefills = {name: statistics.median(steps.prefill(name) for _ in range(3)) for name in _KINDS}
    taken = [{name: steps.decode(name) for name in _KINDS} for _ in range(rounds)]
    seconds = {name: statistics.median(one[name] for one in taken) for name in _KINDS}
    for name in _KINDS:
        console.print(
            f"{name}: {seconds[name] * 1e3:.2f} ms a step of {_REQUESTS}, "
            f"{_REQUESTS / seconds[name]:.1f} tokens/s; prompts of {_PROMPT}: {prefills[name] * 1e3:.0f} ms"
        )
    ratio = statistics.median(one["plain"] / one["adapted"] for one in taken)
    console.print(
        f"{adapters} adapters of rank {rank}: {ratio:.3f} of the tokens/s without, "
        f"prompts {prefills['plain'] / prefills['adapted']:.3f}"
    )


_KINDS = ("plain", "adapted")


class _Steps:
    """Two sets of requests, of which one has adapters."""

    def __init__(self, runner: Runner | StageRunner, digests: list[str]) -> None:
        self._runner = runner
        self._digests = digests
        self._step = 0
        self._started: set[str] = set()

    def prefill(self, name: str) -> float:
        """Seconds of a step with the prompts of four requests; the others' are computed beside."""
        slots = self._slots(name)
        self._run([], [], 0, freed=slots if name in self._started else [])
        self._started.add(name)
        took = 0.0
        for first in range(0, _REQUESTS, 4):
            some = slots[first : first + 4]
            took = self._run([self._start(name, slot) for slot in some], some, _PROMPT)
        return took

    def decode(self, name: str) -> float:
        return self._run([], self._slots(name), 1)

    def _slots(self, name: str) -> list[int]:
        first = _KINDS.index(name) * _REQUESTS
        return list(range(first, first + _REQUESTS))

    def _start(self, name: str, slot: int) -> SlotStart:
        return SlotStart(
            slot=slot,
            token_ids=torch.randint(1000, (_PROMPT,)).tolist(),
            num_prompt_tokens=_PROMPT,
            num_computed_tokens=0,
            block_ids=[list(range(slot * _BLOCKS, (slot + 1) * _BLOCKS))],
            work=Work(
                SamplingParams(temperature=0, seed=0, max_tokens=10_000),
                adapter=self._digests[slot % len(self._digests)] if name == "adapted" else "",
            ),
        )

    def _run(
        self, starts: list[SlotStart], slots: list[int], count: int, freed: list[int] | None = None
    ) -> float:
        plan = StepPlan(
            step=self._step,
            slots=slots,
            num_tokens=[count] * len(slots),
            starts=starts,
            freed_slots=freed or [],
        )
        self._step += 1
        began = time.perf_counter()
        self._runner.submit(plan).result()
        return time.perf_counter() - began


def _save(config: ModelSpec, directory: Path, rank: int, seed: int) -> Adapter:
    """An adapter of all linear layers, of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for linear in (*config.attention_linears(layer), *config.mlp_linears(layer)):
            shapes = {"A": (rank, linear.inputs), "B": (linear.outputs, rank)}
            for matrix, shape in shapes.items():
                values = torch.randn(shape, generator=generator) * linear.inputs**-0.5
                name = f"base_model.model.{linear.name}.lora_{matrix}.weight"
                tensors[name] = values.to(torch.bfloat16)
    directory.mkdir()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / CONFIG_FILE).write_text(json.dumps(fields))
    save_file(tensors, directory / WEIGHTS_FILE)
    return Adapter(directory.name, str(directory), adapter_digest(directory))


if __name__ == "__main__":
    _app()
