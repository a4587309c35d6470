"""Which backend a worker computes with.

`python -m pagoda.worker.backends` says it in one line: `pagoda doctor`, which never loads torch, asks that way.
"""

from __future__ import annotations

from typing import Any

import torch

from pagoda.backend.base import Backend
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.native import BackendUnavailableError, choose_instruction_set
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.errors import ConfigError
from pagoda.ipc.machine import available_cores
from pagoda.parallel.collectives import Collectives

BACKENDS = ("auto", "cpu", "reference")


def choose_backend(wanted: str, group: Collectives | None = None) -> tuple[Backend[Any, Any], str]:
    """The backend of a rank of the group, alone without one, and one line for the operator about it.

    Raises:
        ConfigError: there is no such backend here.
    """
    if wanted not in BACKENDS:
        raise ConfigError(f"--backend must be one of {', '.join(BACKENDS)}, got {wanted!r}.")
    if wanted == "reference":
        return _reference("", group)
    try:
        backend = CpuBackend(choose_instruction_set(), group)
    except BackendUnavailableError as error:
        if wanted == "cpu":
            raise ConfigError(f"--backend cpu is not available: {error}.") from None
        return _reference(f" (not the cpu backend: {error})", group)
    return backend, backend.summary


def _reference(reason: str, group: Collectives | None) -> tuple[Backend[Any, Any], str]:
    backend = ReferenceBackend(group)
    return backend, f"{backend.summary}{reason}"


def main() -> None:
    torch.set_num_threads(available_cores())
    _, line = choose_backend("auto")
    print(line)


if __name__ == "__main__":
    main()
