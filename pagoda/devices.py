"""Registry of backends and the devices that they compute on; importing it imports no backend."""

from __future__ import annotations

import os
import re
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
_DEVICE = re.compile(r"([a-z]+):(0|[1-9][0-9]{0,4})")


class BackendUnavailableError(Exception):
    """This machine or installation does not have a backend; the message says why."""


def check_devices(devices: Sequence[str]) -> None:
    """Checks the names of the devices of all ranks, such as `cpu:0`.

    Raises ConfigError if a name is not that of a device, is there twice, or no backend computes on all devices.
    """
    known = dict.fromkeys(entry.device_kind for entry in BACKENDS.values())
    kinds: set[str] = set()
    for device in devices:
        match = _DEVICE.fullmatch(device)
        if match is None:
            raise ConfigError(
                f"--devices takes names such as cpu:0, separated by commas, got {device!r}."
            )
        if match[1] not in known:
            raise ConfigError(
                f"--devices names {device}, but no backend computes there; name {' or '.join(known)} devices."
            )
        kinds.add(match[1])
    duplicates = sorted({device for device in devices if devices.count(device) > 1})
    if duplicates:
        raise ConfigError(
            f"--devices names {', '.join(duplicates)} more than once; every rank needs a device of its own."
        )
    if len(kinds) > 1:
        raise ConfigError(
            f"--devices mixes {' and '.join(sorted(kinds))}; name devices of one kind."
        )


def check_devices_of_host(devices: Sequence[str], num_workers: int, threads: int | None) -> None:
    """Checks that this host has the devices of its workers, each of which has so many threads if that was said.

    Raises ConfigError if the host has fewer devices.
    """
    cores = len(os.sched_getaffinity(0))
    count = num_cpu_devices(cores, num_workers, threads)
    for device in devices:
        if device_number(device) >= count:
            known = "cpu:0" if count == 1 else f"cpu:0 to cpu:{count - 1}"
            raise ConfigError(
                f"--devices names {device}, but the {cores} cores of this host are {known} with "
                f"{num_workers} workers" + (f" of {threads} threads." if threads else ".")
            )


def num_cpu_devices(cores: int, workers: int, threads: int | None) -> int:
    """Number of devices into which the cores of a host are divided: `cpu:i` is the i-th of so many equal parts.

    One for each of the host's workers, or as many as have `threads` cores, if that is more.
    """
    return max(workers, cores // threads) if threads else workers


def device_number(device: str) -> int:
    """Number of a device: 3 for `cpu:3`."""
    return int(device.partition(":")[2])


def default_device(rank: int) -> str:
    """Device of a rank where none are named."""
    return f"cpu:{rank}"
