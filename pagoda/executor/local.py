"""Workers as child processes on this host."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagoda.executor.base import WorkerLost
from pagoda.executor.launcher import worker_name
from pagoda.ipc.lifeline import ChildProcess, kill_all
from pagoda.messages.worker_config import WorkerConfig

WORKER_MODULE = "pagoda.worker.main"


class LocalLauncher:
    def __init__(self, module: str = WORKER_MODULE) -> None:
        self._module = module

    def launch(self, configs: Sequence[WorkerConfig], address: str) -> LocalWorkers:
        return LocalWorkers(
            {
                worker_name(config): ChildProcess(
                    self._module, [address], config=msgspec.msgpack.encode(config)
                )
                for config in configs
            }
        )


class LocalWorkers:
    def __init__(self, children: dict[str, ChildProcess]) -> None:
        self._children = children

    @property
    def are_placed(self) -> bool:
        return True

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def pollables(self) -> list[object]:
        return list(self._children.values())

    def lost(self) -> WorkerLost | None:
        ended = [
            (child.was_killed(), f"{name} {child.describe_end()}")
            for name, child in self._children.items()
            if not child.is_alive()
        ]
        # Others that exit because of one that was killed are not the reason.
        killed = [reason for was_killed, reason in ended if was_killed]
        reasons = killed or [reason for _, reason in ended]
        return WorkerLost(reasons[0]) if reasons else None

    def close(self) -> None:
        kill_all(self._children.values())
