"""How the worker processes of one replica are started, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagoda.engine.messages import WorkerConfig


class WorkerSet(Protocol):
    """The workers of one start, until they are closed."""

    def pollables(self) -> list[object]:
        """What becomes readable when a worker has ended."""
        ...

    def lost(self) -> str | None:
        """How the first worker that ended did, such as `the worker was killed by SIGKILL`; None while all live."""
        ...

    def close(self) -> None:
        """Ends all of them, and waits until they have ended. May be called twice."""
        ...


class Launcher(Protocol):
    def launch(self, configs: Sequence[WorkerConfig], address: str) -> WorkerSet:
        """Starts one worker for each config, in that order; each connects to the engine's socket at `address`.

        Does not wait for them.
        """
        ...
