# SPDX-License-Identifier: Apache-2.0
"""The runner of a worker without an engine: a model of random weights that takes plans of steps."""

from __future__ import annotations

from pagoda.ipc.machine import available_cores
from pagoda.messages.adapters import Adapter
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import LoadedWorker, load_runner, plan_worker


def load_dummy(
    model: str,
    dtype: str,
    quantization: str,
    threads: int | None,
    *,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int,
    adapters: tuple[Adapter, ...] = (),
    max_lora_rank: int = 64,
) -> LoadedWorker:
    """Loads a shape preset; `threads` is by default the number of usable cores."""
    config = WorkerConfig(
        model=model,
        load_format="dummy",
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        num_threads=threads or available_cores(),
        adapters=adapters,
        max_lora_rank=max_lora_rank,
    )
    return load_runner(plan_worker(config), Tracer("worker"))
