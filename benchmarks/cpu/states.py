"""Time of a token behind short and long contexts, of layers as Qwen3-Next has them.

`python -m benchmarks.cpu.states [--kv-cache-dtype int8] [--layers 4] [--experts 32]`. Three of four layers have a
delta rule. All sizes of a layer are those of Qwen3-Next-80B-A3B, but for the number of experts, of which a token
goes through ten; the head has its share of one of 48 layers. Steps behind the contexts take turns, and all memory
of keys, values and states is written before. With `--attention` all layers have attention instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch

from pagoda.cli import output
from pagoda.ipc.machine import available_cores
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import LoadedWorker, load_runner, plan_worker
from pagoda.worker.runner import Runner

_CONTEXTS = (1024, 32_768)
_STEPS, _WARM_UP = 24, 4
_PROMPT = 512
_VOCABULARY, _LAYERS = 151_936, 48


def _config(layers: int, experts: int, *, attention: bool) -> dict[str, Any]:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": _VOCABULARY * layers // _LAYERS,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": experts,
        "num_experts_per_tok": 10,
        "layer_types": ["full_attention" if attention else kinds[i % 4] for i in range(layers)],
        "max_position_embeddings": 2 * max(_CONTEXTS),
        "rope_theta": 1e7,
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--layers", type=int, default=4, help="a multiple of 4")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--attention", action="store_true", help="attention in all layers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        config = _config(options.layers, options.experts, attention=options.attention)
        Path(directory, "config.json").write_text(json.dumps(config), encoding="utf-8")
        loaded = _load(directory, options.kv_cache_dtype)
    console = output.stdout()
    console.print(loaded.ready.summary)
    torch.manual_seed(0)
    for held in loaded.runner.model.caches:
        for tensor in held.cache.tensors.values():
            # Bytes of an exponent about one, whatever they are read as.
            tensor.view(torch.uint8).fill_(60)
    steps = _Steps(loaded)
    seconds = statistics.median(steps.prefill() for _ in range(4))
    console.print(f"prompt of {_PROMPT}: {seconds * 1e3:.1f} ms, {_PROMPT / seconds:.0f} tokens/s")
    times: dict[int, list[float]] = {context: [] for context in _CONTEXTS}
    for slot, context in enumerate(_CONTEXTS):
        steps.start(slot, context)
    for step in range(_WARM_UP + _STEPS):
        for slot, context in enumerate(_CONTEXTS):
            seconds = steps.decode(slot)
            if step >= _WARM_UP:
                times[context].append(seconds)
    short, long = (statistics.median(times[context]) for context in _CONTEXTS)
    console.print(
        f"a token behind {_CONTEXTS[0]:,}: {short * 1e3:.2f} ms, behind {_CONTEXTS[1]:,}: {long * 1e3:.2f} ms, "
        f"{long / short:.3f} times as much"
    )


def _load(directory: str, kv_cache_dtype: str) -> LoadedWorker:
    config = WorkerConfig(
        model=directory,
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max(_CONTEXTS) + 4 * _STEPS,
        max_num_seqs=3,
        num_threads=available_cores(),
    )
    return load_runner(plan_worker(config), Tracer("worker"), num_blocks=200)


class _Steps:
    def __init__(self, loaded: LoadedWorker) -> None:
        assert isinstance(loaded.runner, Runner)
        self._runner: Runner = loaded.runner
        self._sizes = loaded.runner.batch.block_sizes
        self._keeps_all = [group.keeps_all for group in loaded.ready.kv_groups]
        self._free = list(range(200))
        self._step = 0

    def start(self, slot: int, context: int) -> None:
        """Puts a request into a slot whose context, but for its last token, is computed."""
        end = context + 2 * (_WARM_UP + _STEPS)
        self._run(self._start(slot, context, context - 1, end), [slot], [1])

    def prefill(self) -> float:
        """Computes a prompt in the last slot; returns the seconds."""
        kept = list(self._free)
        seconds = self._run(self._start(2, _PROMPT, 0, _PROMPT), [2], [_PROMPT])
        self._run(None, [], [], freed=[2])
        self._free = kept
        return seconds

    def decode(self, slot: int) -> float:
        """A token of a slot; returns the seconds."""
        return self._run(None, [slot], [1])

    def _start(self, slot: int, length: int, computed: int, end: int) -> SlotStart:
        """A request; of its states one block each is enough, in which they move on."""
        blocks = []
        for size, keeps_all in zip(self._sizes, self._keeps_all, strict=True):
            count = -(-end // size)
            own = [self._free.pop() for _ in range(count if keeps_all else 1)]
            blocks.append(own if keeps_all else own * count)
        tokens = torch.randint(1000, (length,)).tolist()
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=10_000)
        return SlotStart(slot, tokens, length, computed, blocks, sampling)

    def _run(
        self,
        start: SlotStart | None,
        slots: list[int],
        counts: list[int],
        freed: list[int] | None = None,
    ) -> float:
        starts = [] if start is None else [start]
        plan = StepPlan(self._step, slots, counts, starts, [], freed or [])
        self._step += 1
        return self._runner.submit(plan).result().step_time_s


if __name__ == "__main__":
    main()
