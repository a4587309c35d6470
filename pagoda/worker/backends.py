"""Choice of the backend that a worker computes with.

`python -m pagoda.worker.backends` says it in one line: `pagoda doctor`, which never loads torch, asks that way.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from pagoda.backend.base import Backend
from pagoda.devices import BACKENDS, BackendUnavailableError
from pagoda.errors import ConfigError
from pagoda.ipc.machine import available_cores
from pagoda.parallel.collectives import Collectives


def choose_backend(wanted: str, group: Collectives | None = None) -> tuple[Backend[Any, Any], str]:
    """The backend of a rank of the group, alone without one, and one line about it for the operator.

    `auto` takes the first backend of the registry that this machine has.
    Raises ConfigError: there is no such backend here."""
    if wanted not in ("auto", *BACKENDS):
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(f"--backend must be one of {known}, got {wanted!r}.")
    missing: list[str] = []
    for name in BACKENDS if wanted == "auto" else (wanted,):
        try:
            backend: Backend[Any, Any] = importlib.import_module(
                BACKENDS[name].module
            ).open_backend(group)
        except BackendUnavailableError as error:
            missing.append(f"not the {name} backend: {error}")
            reason = str(error)
        else:
            threads = torch.get_num_threads()
            line = f"{backend.arithmetic}, {threads} thread{'s' if threads > 1 else ''}"
            return backend, " ".join((line, *(f"({why})" for why in missing)))
    raise ConfigError(f"--backend {wanted} is not available: {reason}.")


def main() -> None:
    torch.set_num_threads(available_cores())
    _, line = choose_backend("auto")
    print(line)


if __name__ == "__main__":
    main()
