# SPDX-License-Identifier: Apache-2.0
"""pagoda-tiny on the model of the device, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from pagoda.checkpoints.resolve import EMBEDDED_MODEL, resolve_model
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=24)
PROMPTS = [[(7 * at + 31 * seed) % 900 for at in range(130 + seed)] for seed in range(3)]


class Rig(NamedTuple):
    """A loaded model, the worker that it drives, and what was called and copied there."""

    runner: Runner
    worker: Any
    calls: dict[str, tuple[Any, list[Any]]]
    """The last call of each program."""
    downloads: list[int]
    """Bytes of each copy to the host."""

    def prefill(self, sampling: Sequence[SamplingParams] = (GREEDY,) * 3) -> StepResult:
        """The first step of three requests."""
        starts = [
            SlotStart(slot, prompt, len(prompt), 0, [[2 * slot, 2 * slot + 1]], Work(own))
            for slot, (prompt, own) in enumerate(zip(PROMPTS, sampling, strict=True))
        ]
        lens = [len(prompt) for prompt in PROMPTS]
        return self.runner.submit(StepPlan(0, [0, 1, 2], lens, starts)).result()

    def decode(self, step: int = 1) -> StepResult:
        return self.runner.submit(StepPlan(step, [0, 1, 2], [1, 1, 1])).result()


def load_rig(
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tracer: Tracer,
    **settings: object,
) -> Rig:
    """The rig on a device with some settings, whose programs run as late as they may unless told otherwise."""
    install(**{"late_rate": 1.0} | settings)
    from pagoda_pypto_device import worker as module

    opened: list[Any] = []
    calls: dict[str, tuple[Any, list[Any]]] = {}
    downloads: list[int] = []

    class Recording(module.DistributedWorker):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

        def submit(self, program: Any, *args: Any) -> Any:
            calls[program.name] = program, list(args)
            return super().submit(program, *args)

        def copy_from(self, dst: int, src: int, nbytes: int, *, worker_id: int = 0) -> None:
            downloads.append(nbytes)
            super().copy_from(dst, src, nbytes, worker_id=worker_id)

    monkeypatch.setattr("pagoda_pypto_device.library.DistributedWorker", Recording)
    config = WorkerConfig(
        model=resolve_model(EMBEDDED_MODEL).model,
        backend="pypto",
        dtype="float32",
        num_blocks=8,
        max_num_seqs=4,
        max_model_len=256,
    )
    loaded = load_runner(plan_worker(config), tracer)
    assert isinstance(loaded.runner, Runner)
    return Rig(loaded.runner, opened[-1], calls, downloads)
