# SPDX-License-Identifier: Apache-2.0
"""Decoding behind a context whose segments are cold, against what the memory that they lie in can give.

    python -m benchmarks.cpu.streaming --context 32768 --directory DIR

K and V are written, not computed. The limit of host memory is what `pagoda doctor` measures, with as many threads;
that of the disk is the time in which threads read the same files and do nothing else.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import msgspec
import torch
from cyclopts import App

from pagoda.cli.machine_facts import measure_read_bandwidth
from pagoda.ipc.machine import available_cores
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.segments import ColdSegment
from pagoda.messages.transfers import HostSlots, TierBlocks
from pagoda.messages.worker import SlotStart, StepPlan, StepResult
from pagoda.messages.worker_config import KVTierConfig, WorkerConfig
from pagoda.plugins.disk_tier.manifest import make_manifest
from pagoda.plugins.disk_tier.objects import ObjectFiles, object_name
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.kv.staging import READERS
from pagoda.worker.kv.transfers import KVTiers, open_tiers, stream_segments
from pagoda.worker.loading import LoadedWorker, load_runner, plan_worker
from pagoda.worker.memory_plan import WorkerMemoryPlan
from pagoda.worker.runner import Runner

app = App()
_NUM_BLOCKS = 64
"""Blocks on the device."""
_STEPS = 7


@app.default
def main(
    directory: Path,
    context: int = 32768,
    preset: str = "qwen3-0.6b",
    kv_cache_dtype: str = "int8",
    block_size: int = 32,
    threads: int | None = None,
) -> None:
    """Prints seconds of streaming per step, bytes per second, and the share of the limit, for both storeys."""
    config = WorkerConfig(
        model=preset,
        load_format="dummy",
        quantization="int8",
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        max_model_len=context + 64,
        max_num_seqs=1,
        num_threads=threads or available_cores(),
        kv_host_bytes=1,
        kv_tiers={"disk": KVTierConfig(str(directory), 2**40)},
    )
    plan = _with_arena(config, context)
    loaded = load_runner(plan, Tracer("worker"), agree_on_kv=lambda _: _NUM_BLOCKS)
    tiers = open_tiers(plan, loaded)
    stream_segments(plan, loaded, tiers, loaded.ready)
    segments = context // config.segment_tokens
    per_segment = config.segment_tokens // block_size
    slots = [list(range(i * per_segment, (i + 1) * per_segment)) for i in range(segments)]
    keys = [[bytes([i, j]) + bytes(30) for j in range(per_segment)] for i in range(segments)]
    files = _write(plan, loaded, tiers, [key for own in keys for key in own])
    requests = _Requests(loaded, context)
    for name, places, rate in (
        ("host memory", [HostSlots(own) for own in slots], _memory_rate),
        (
            "disk",
            [TierBlocks("disk", own) for own in keys],
            lambda: _rate(lambda: _read_files(files)),
        ),
    ):
        results = requests.decode(places)
        seconds = statistics.median(result.stream_time_s for result in results)
        num_bytes = results[0].streamed_bytes
        limit = max(rate() for _ in range(3))
        rest = statistics.median(result.forward_time_s - result.stream_time_s for result in results)
        print(
            f"{name}: {num_bytes / 2**20:.0f} MiB of a step in {seconds:.3f} s "
            f"({results[0].stream_time_s:.3f} s the first time), {num_bytes / seconds / 1e9:.2f} GB/s; "
            f"reading alone {limit / 1e9:.2f} GB/s: {num_bytes / limit / seconds:.0%}; "
            f"the rest of the step {rest:.3f} s"
        )


def _with_arena(config: WorkerConfig, context: int) -> WorkerMemoryPlan:
    bytes_per_block = plan_worker(msgspec.structs.replace(config, kv_host_bytes=0)).bytes_per_block
    slots = context // (config.block_size or 1)
    return plan_worker(
        msgspec.structs.replace(config, kv_host_bytes=slots * (bytes_per_block + 64))
    )


def _write(
    plan: WorkerMemoryPlan,
    loaded: LoadedWorker,
    tiers: KVTiers,
    keys: list[bytes],
) -> list[Path]:
    """Fills the arena and objects with bytes of an exponent about one; gives the files."""
    assert tiers.arena is not None
    tiers.arena.taking.join()
    torch.frombuffer(tiers.arena.memory, dtype=torch.uint8).fill_(60)
    manifest = make_manifest(plan, loaded.kv, loaded.ready.arithmetic)
    files = ObjectFiles(Path(tiers.further["disk"].place.path), manifest)
    buffer = files.new_buffer()
    torch.frombuffer(buffer, dtype=torch.uint8).fill_(60)
    for key in keys:
        files.write(key, buffer)
    os.sync()
    return [files.directory / object_name(key) for key in keys]


class _Requests:
    def __init__(self, loaded: LoadedWorker, context: int) -> None:
        assert isinstance(loaded.runner, Runner)
        self._runner: Runner = loaded.runner
        self._context = context
        self._step = 0
        self._block_size = loaded.ready.block_size

    def decode(self, places: list[HostSlots] | list[TierBlocks]) -> list[StepResult]:
        """Decodes behind a context in these places."""
        tokens = torch.randint(1000, (self._context + 1,)).tolist()
        blocks = [0] * (self._context // self._block_size) + [1, 2]
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=10_000)
        cold = [ColdSegment(0, 0, place) for place in places]
        start = SlotStart(
            0, tokens, len(tokens), self._context, [blocks], Work(sampling), cold=cold
        )
        found = [self._run([start], [])]
        found += [self._run([], []) for _ in range(_STEPS - 1)]
        self._run([], [0])
        return found

    def _run(self, starts: list[SlotStart], freed: list[int]) -> StepResult:
        slots = [] if freed else [0]
        plan = StepPlan(self._step, slots, [1] * len(slots), starts, freed_slots=freed)
        self._step += 1
        result = self._runner.submit(plan).result()
        assert not result.lost_segments, result.lost_segments
        return result


def _memory_rate() -> float:
    return measure_read_bandwidth(torch.get_num_threads()).bytes_per_s


def _read_files(paths: list[Path]) -> int:
    def read(path: Path) -> int:
        size = path.stat().st_size
        with mmap.mmap(-1, size) as buffer:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                return os.preadv(descriptor, [buffer], 0)
            finally:
                os.close(descriptor)

    with ThreadPoolExecutor(READERS) as pool:
        return sum(pool.map(read, paths))


def _rate(read: Callable[[], int]) -> float:
    began = time.perf_counter()
    num_bytes = read()
    return num_bytes / (time.perf_counter() - began)


if __name__ == "__main__":
    app()
