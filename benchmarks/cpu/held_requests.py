# SPDX-License-Identifier: Apache-2.0
"""Requests behind long contexts at a worker's runner, whose caches are written but were never computed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from pagoda.ipc.machine import available_cores
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import LoadedWorker, load_runner, plan_worker
from pagoda.worker.runner import Runner


def load_layers(
    config: Mapping[str, object],
    kv_cache_dtype: str,
    *,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int,
    threads: int | None = None,
) -> LoadedWorker:
    """A model of some config.json with random weights in bfloat16; all memory of its cache is written."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config), encoding="utf-8")
        wanted = WorkerConfig(
            model=directory,
            load_format="dummy",
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            num_threads=threads or available_cores(),
        )
        loaded = load_runner(
            plan_worker(wanted), Tracer("worker"), agree_on_kv=lambda _: num_blocks
        )
    for held in loaded.runner.model.caches:
        for tensor in held.cache.tensors.values():
            # Bytes of an exponent about one, whatever they are read as.
            tensor.view(torch.uint8).fill_(60)
    return loaded


class HeldRequests:
    """Requests in slots, with blocks of their own; calls give the seconds of a step."""

    def __init__(self, loaded: LoadedWorker) -> None:
        assert isinstance(loaded.runner, Runner)
        self._runner: Runner = loaded.runner
        self._sizes = loaded.runner.batch.block_sizes
        self._keeps_all = [group.keeps_all for group in loaded.ready.kv_groups]
        self._free = list(range(loaded.ready.num_blocks))
        self._step = 0
        self.expert_tokens: list[int] = []
        """Tokens of the last step that went to each expert, in all layers together."""
        torch.manual_seed(0)

    def start(self, slot: int, context: int, end: int) -> float:
        """Puts a request into a slot whose context, but for its last token, is held, and may grow up to `end`."""
        return self._run(self._start(slot, context, context - 1, end), [slot], [1])

    def prefill(self, slot: int, length: int) -> float:
        """Computes a prompt in a slot, which is free again."""
        kept = list(self._free)
        seconds = self._run(self._start(slot, length, 0, length), [slot], [length])
        self.end([slot])
        self._free = kept
        return seconds

    def end(self, slots: list[int]) -> None:
        self._run(None, [], [], freed=slots)

    def decode(self, slots: list[int]) -> float:
        """A token of each of some slots."""
        return self._run(None, slots, [1] * len(slots))

    def _start(self, slot: int, length: int, computed: int, end: int) -> SlotStart:
        """A request; of its states one block each is enough, in which they move on."""
        blocks = []
        for size, keeps_all in zip(self._sizes, self._keeps_all, strict=True):
            count = -(-end // size)
            own = [self._free.pop() for _ in range(count if keeps_all else 1)]
            blocks.append(own if keeps_all else own * count)
        tokens = torch.randint(1000, (length,)).tolist()
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=10_000)
        return SlotStart(slot, tokens, length, computed, blocks, Work(sampling))

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
        result = self._runner.submit(plan).result()
        self.expert_tokens = result.expert_tokens
        return result.step_time_s
