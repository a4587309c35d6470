# SPDX-License-Identifier: Apache-2.0
"""Adapters that come and go while a worker runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.checkpoints.adapters import AdapterFiles, read_adapter
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.errors import ConfigError
from pagoda.ipc.machine import format_bytes
from pagoda.messages.adapters import Adapter
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.adapters import Adapters, adapter_bytes

if TYPE_CHECKING:
    from pagoda.worker.memory_plan import WorkerMemoryPlan


@dataclass(frozen=True)
class AdapterLoader:
    """Loads and forgets adapters of a worker that runs."""

    plan: WorkerMemoryPlan
    adapters: Adapters | None
    """None where there are none and none may come."""

    def load(self, adapter: Adapter) -> None:
        """Raises ConfigError: the adapter cannot be loaded; says why."""
        if self.adapters is None:
            raise ConfigError("the worker was started without adapters.")
        plan = self.plan
        files = adapter_files(adapter, plan.shard.config, plan.config)
        num_bytes = adapter_bytes(files, plan.shard, plan.dtype)
        memory = plan.backend.memory
        available = memory.free_bytes()
        sharing = plan.config.workers_on_host if memory.on_host else 1
        if num_bytes > available // sharing:
            raise ConfigError(
                f"the adapter {adapter.name} takes {format_bytes(num_bytes)}, but only {format_bytes(available)} "
                "of memory are free; unload another."
            )
        self.adapters.load(files)

    def unload(self, digest: str) -> None:
        if self.adapters is not None:
            self.adapters.unload(digest)


def adapter_files(adapter: Adapter, shape: ModelSpec, config: WorkerConfig) -> AdapterFiles:
    """Raises ConfigError: the adapter does not fit the model, or is another one by now."""
    files = read_adapter(Path(adapter.path), shape, max_rank=config.max_lora_rank)
    if files.digest != adapter.digest:
        raise ConfigError(
            f"the files of the adapter {adapter.name} in {adapter.path} have changed; load it under another name."
        )
    return files
