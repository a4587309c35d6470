"""Registry of backends and the devices that they compute on; importing it imports no backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pagoda.errors import ConfigError

BackendName = Literal["auto", "cpu", "reference"]
"""Values of `--backend`: `auto` takes the first backend of the registry that this machine has."""


@dataclass(frozen=True)
class BackendEntry:
    """One backend, found by name."""

    module: str
    """Module with a function `open_backend(group) -> Backend`; it raises `BackendUnavailableError`."""
    device_kind: str
    """Kind of device, such as `cpu` in `cpu:0`."""


BACKENDS: Mapping[str, BackendEntry] = {
    "cpu": BackendEntry("pagoda.backend.cpu.backend", "cpu"),
    "reference": BackendEntry("pagoda.backend.reference.backend", "cpu"),
}
"""Backends in the order in which `auto` tries them."""


class BackendUnavailableError(Exception):
    """This machine or installation does not have a backend; the message says why."""


def check_devices(devices: Sequence[str]) -> None:
    """Checks devices such as `cpu:0`.

    Raises:
        ConfigError: no backend computes on one of them.
    """
    kinds = dict.fromkeys(entry.device_kind for entry in BACKENDS.values())
    for device in devices:
        if device.partition(":")[0] not in kinds:
            raise ConfigError(
                f"--devices names {device}, but no backend computes there; name {' or '.join(kinds)} devices."
            )


def device_number(device: str) -> int:
    """Number of a device: 3 for `cpu:3`."""
    return int(device.partition(":")[2])


def default_device(rank: int) -> str:
    """Device of a rank where none are named."""
    return f"cpu:{rank}"
