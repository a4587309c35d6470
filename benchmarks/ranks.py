# SPDX-License-Identifier: Apache-2.0
"""Two ranks of one replica in three ways: sharing heads (`--tp 2`), contexts (`--cp 2`) or requests
(`--tp 2 --enable-dp-attention`).

`python -m benchmarks.ranks bytes` counts what a rank needs of the other one in a layer, for each row of a step, on
the reference backend: a sum over both as in a ring. `python -m benchmarks.ranks time` is `pagoda bench compare`
with a server of each kind, on one thread a rank.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
from cyclopts import App
from torch import Tensor

from pagoda.checkpoints.presets import PRESETS
from pagoda.cli import output
from pagoda.cli.server_process import server_process
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.collectives import RankGroups, stage_groups, sum_in_order
from pagoda.parallel.config import ParallelConfig
from pagoda.parallel.segments import BlockRanks, SegmentShares
from pagoda.plugins.backend_check.threads import ThreadGroup, ThreadRank
from pagoda.plugins.bench.compare import CompareOptions, compare
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner, StageRunner

SIZE = 2
KINDS = {
    "--tp 2": ParallelConfig(tensor_parallel_size=SIZE),
    "--cp 2": ParallelConfig(context_parallel_size=SIZE),
    "--tp 2 --enable-dp-attention": ParallelConfig(tensor_parallel_size=SIZE, dp_attention=True),
}
_SEGMENT, _BLOCK, _SLOTS = 128, 16, 4
_LAYERS = (1, 2)
_PROMPTS = {"prompts of 96": 96, "prompts of 384": 384}
"""Tokens of each of `_SLOTS`: within a segment, and in three of them."""

_app = App()


class CountedRank(ThreadRank):
    """A rank that counts the bytes which it needs of others, summing in a ring (Patarasuk and Yuan 2009)."""

    num_bytes = 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_bytes += 2 * (self.size - 1) / self.size * x.nbytes
        return sum_in_order(super().all_gather(x))

    def all_gather(self, x: Tensor) -> Tensor:
        self.num_bytes += (self.size - 1) * x.nbytes
        return super().all_gather(x)

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        rows = sum(row[self.rank] for rank, row in enumerate(counts) if rank != self.rank)
        self.num_bytes += rows * x.itemsize * x.shape[1:].numel()
        return super().all_to_all(x, counts)


class _Ranks:
    """The ranks of a model of few layers, as threads, that compute steps of all slots."""

    def __init__(self, model: Path, dtype: str, parallel: ParallelConfig) -> None:
        config = WorkerConfig(
            model=str(model),
            load_format="dummy",
            backend="reference",
            dtype=dtype,
            max_model_len=512,
            max_num_seqs=_SLOTS,
            num_blocks=(512 // _BLOCK) * _SLOTS,
            block_size=_BLOCK,
            segment_tokens=_SEGMENT,
            parallel=parallel,
        )
        group = ThreadGroup(SIZE)
        self._parallel, self._num_blocks = parallel, config.num_blocks or 0
        self._ranks = [CountedRank(group, rank) for rank in range(SIZE)]
        self._pool = ThreadPoolExecutor(max_workers=SIZE)
        self._runners = list(self._pool.map(self._load, self._configs(config), self._ranks))
        self._step = 0

    def _configs(self, config: WorkerConfig) -> list[WorkerConfig]:
        places = self._parallel.places(0)
        return [msgspec.structs.replace(config, place=place) for place in places]

    def _load(self, config: WorkerConfig, rank: CountedRank) -> Runner | StageRunner:
        groups: RankGroups = stage_groups(self._parallel, {"stage": rank})
        return load_runner(plan_worker(config), Tracer("worker"), groups).runner

    def count(self, num_tokens: int) -> tuple[float, float]:
        """Bytes that a rank needs of the other one for each row, of prompts and of one token behind each."""
        starts = [self._start(slot, num_tokens) for slot in range(_SLOTS)]
        prompts = self._run(starts, num_tokens)
        return prompts, self._run([], 1)

    def _start(self, slot: int, num_tokens: int) -> SlotStart:
        own = slot * SIZE // _SLOTS if self._parallel.dp_attention else 0
        shares = SegmentShares(self._parallel.context_parallel_size, _SEGMENT)
        ranks = BlockRanks(own, shares, _BLOCK)
        each = 512 // _BLOCK
        blocks = [ranks.of(at) * self._num_blocks + slot * each + at for at in range(each)]
        return SlotStart(
            slot=slot,
            token_ids=[(7 * slot + at) % 256 for at in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            block_ids=[blocks],
            work=Work(SamplingParams(temperature=0, seed=0, max_tokens=8)),
            rank=own,
        )

    def _run(self, starts: list[SlotStart], num_tokens: int) -> float:
        freed = list(range(_SLOTS)) if starts and self._step else []
        slots = list(range(_SLOTS))
        plan = StepPlan(self._step, slots, [num_tokens] * _SLOTS, starts, freed_slots=freed)
        self._step += 1
        before = sum(rank.num_bytes for rank in self._ranks)
        list(self._pool.map(lambda runner: runner.submit(plan).result(None), self._runners))
        counted = sum(rank.num_bytes for rank in self._ranks) - before
        return counted / SIZE / (num_tokens * _SLOTS)

    def close(self) -> None:
        self._pool.shutdown()


@_app.command(name="bytes")
def count_bytes(*, model: str = "qwen3-0.6b", dtype: str = "bfloat16") -> None:
    """Counts bytes of a layer.

    Args:
        model: A shape preset.
        dtype: Of weights and activations.
    """
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as directory:
        for kind, parallel in KINDS.items():
            found: list[list[float]] = []
            for num_layers in _LAYERS:
                path = Path(directory) / str(num_layers)
                path.mkdir(exist_ok=True)
                shape = {**PRESETS[model], "num_hidden_layers": num_layers, "vocab_size": 1024}
                (path / "config.json").write_text(json.dumps(shape))
                ranks = _Ranks(path, dtype, parallel)
                found.append([it for size in _PROMPTS.values() for it in ranks.count(size)])
                ranks.close()
            few, many = found
            each = (f"{more - less:,.0f}" for less, more in zip(few, many, strict=True))
            rows.append((kind, *each))
    head = [it for name in _PROMPTS for it in (name, "a token behind each")]
    title = f"Bytes that a rank needs of the other one in a layer of {model}, {dtype}, for each row"
    output.stdout().print(output.table(title, ("ranks", *head), rows))


@_app.command
def time(*, model: str = "qwen3-0.6b", dtype: str = "bfloat16", concurrency: str = "1,8") -> None:
    """Compares servers.

    Args:
        model: A shape preset.
        dtype: Of weights and activations.
        concurrency: Requests under way at once; several numbers, separated by commas.
    """
    load = CompareOptions(concurrency=concurrency, input_len=128, output_len=32, num_prompts=8)
    flags = ["--load-format", "dummy", "--dtype", dtype, "--threads", "1", "--log-level", "warning"]
    flags += ["--max-model-len", "2048", "--num-kv-blocks", "512"]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(server_process([model, *flags, *kind.split()])) for kind in KINDS
        ]
        compare(base_url=tuple(server.base_url for server in servers), load=load)


if __name__ == "__main__":
    _app()
