"""KV tiers of a worker: slots in host memory, and a directory on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagoda.kv.objects import ObjectFiles, open_directory
from pagoda.messages.transfers import KVDirectory
from pagoda.messages.worker import WorkerReady
from pagoda.worker.kv.manifest import make_manifest
from pagoda.worker.kv.memory import HostArena, KVMemory
from pagoda.worker.loading import LoadedWorker, WorkerPlan


@dataclass(frozen=True)
class KVTiers:
    """The places that one rank has besides its device."""

    memory: KVMemory
    arena: HostArena | None
    files: ObjectFiles | None

    def described(self, ready: WorkerReady) -> WorkerReady:
        """Adds what the engine needs to know of the tiers to `ready`."""
        directories: tuple[KVDirectory, ...] = ()
        if self.files is not None:
            directories = (KVDirectory(str(self.files.directory), self.files.object_bytes),)
        return msgspec.structs.replace(
            ready,
            kv_host_slots=0 if self.arena is None else self.arena.num_slots,
            kv_directories=directories,
        )


def open_tiers(plan: WorkerPlan, loaded: LoadedWorker) -> KVTiers:
    """The tiers that the configuration asks for. Raises ConfigError if the directory cannot be used."""
    config = plan.config
    memory = KVMemory(loaded.caches)
    arena: HostArena | None = None
    if config.kv_host_bytes:
        arena = HostArena(config.kv_host_bytes, memory.block_bytes)
    files: ObjectFiles | None = None
    if config.kv_disk_path is not None:
        manifest = make_manifest(plan, memory, loaded.ready.arithmetic)
        directory = open_directory(Path(config.kv_disk_path), manifest)
        files = ObjectFiles(directory, manifest)
    return KVTiers(memory, arena, files)
