# SPDX-License-Identifier: Apache-2.0
"""A launcher of workers that launches none: whoever asks for it plays them."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.executor.base import WorkerLost
from pagoda.messages.worker_config import WorkerConfig


class NobodyLaunched:
    """Launcher and set of workers, which never end; remembers what should have been started."""

    are_placed = True
    first_word_s = 60.0

    def __init__(self) -> None:
        self.starts: list[tuple[Sequence[WorkerConfig], str]] = []
        """Configurations and the address of the engine, of each start."""

    @property
    def pids(self) -> dict[str, int]:
        return {}

    def launch(self, configs: Sequence[WorkerConfig], address: str) -> NobodyLaunched:
        self.starts.append((configs, address))
        return self

    def pollables(self) -> list[object]:
        return []

    def lost(self) -> WorkerLost | None:
        return None

    def explained(self, loss: WorkerLost) -> WorkerLost:
        return loss

    def close(self) -> None:
        pass
