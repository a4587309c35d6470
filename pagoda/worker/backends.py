"""Choice of the backend that a worker computes with.

`python -m pagoda.worker.backends` says what there is: `pagoda doctor`, which never loads torch, asks that way.
Each line is a name and what it computes with, or why it cannot; the last line is that of `auto` alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from pagoda.backend.base import Backend
from pagoda.devices import (
    AUTO,
    AUTO_ORDER,
    BackendUnavailableError,
    DeviceSet,
    candidates,
    check_drives,
    find_backend,
    registered_backends,
)
from pagoda.errors import ConfigError
from pagoda.ipc.machine import available_cores
from pagoda.parallel.collectives import Alone, HostGroup

DevicesOf = Callable[[str], DeviceSet]
"""Gives the devices of this rank, for a backend that computes on devices of a kind."""


def first_device(kind: str) -> DeviceSet:
    """The device of a rank that is alone."""
    return DeviceSet(kind, (0,))


def choose_backend(
    wanted: str, group: HostGroup | None = None, devices_of: DevicesOf = first_device
) -> tuple[Backend[Any, Any], str]:
    """The backend of a rank of the group, alone without one, and one line about it for the operator.

    `auto` takes the first backend of `AUTO_ORDER` that this machine has.
    Raises ConfigError: there is no such backend here, or it does not compute on the rank's devices."""
    missing: list[str] = []
    for name in candidates(wanted):
        entry = find_backend(name)
        devices = devices_of(entry.device_kind)
        check_drives(name, entry, devices)
        try:
            module = importlib.import_module(entry.module)
            backend: Backend[Any, Any] = module.open_backend(devices, group or Alone())
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
    known = registered_backends()
    for name in (*AUTO_ORDER, *sorted(known.keys() - {*AUTO_ORDER})):
        packages = "" if name in AUTO_ORDER else f" ({' and '.join(known[name])})"
        print(f"{name}{packages}: {_described(name)}")
    _, line = choose_backend(AUTO)
    print(line)


def _described(name: str) -> str:
    try:
        return choose_backend(name)[1]
    except ConfigError as error:
        return str(error).removesuffix(".")
    except Exception as error:  # of a package that is not Pagoda's
        return f"cannot be opened ({type(error).__name__}: {error})"


if __name__ == "__main__":
    main()
