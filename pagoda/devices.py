# SPDX-License-Identifier: Apache-2.0
"""Registry of backends and the devices that they compute on; importing it imports no backend.

A backend is an entry point of the group `pagoda.backends` of any installed package: its name is that of the
backend, its object a `BackendEntry`, whose module imports no torch, because command line and engine read it too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from pagoda.errors import ConfigError
from pagoda.registry import BACKENDS, registered

AUTO = "auto"
"""Value of `--backend` that takes the first of `AUTO_ORDER` that this machine has."""
AUTO_ORDER = ("cpu", "reference")
HOST_KIND = "cpu"
"""Kind of the devices that are parts of the host's cores."""
_DEVICE = re.compile(r"([a-z]+):(0|[1-9][0-9]{0,4})")


@dataclass(frozen=True)
class BackendEntry:
    """One backend, found by name."""

    module: str
    """Module with a function `open_backend(devices) -> Backend`; it raises `BackendUnavailableError`."""
    device_kind: str
    """Kind of device, such as `cpu` in `cpu:0`."""
    max_devices: int = 1
    """Devices that one rank may drive."""
    shares_ranks: bool = True
    """False where each replica is one rank, which drives all devices of the replica."""


CPU = BackendEntry("pagoda.backend.cpu.backend", HOST_KIND)
REFERENCE = BackendEntry("pagoda.backend.reference.backend", HOST_KIND)


@dataclass(frozen=True)
class DeviceSet:
    """Devices of one kind that one rank drives."""

    kind: str
    numbers: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> DeviceSet:
        """Reads names that are joined by `+`, such as `npu:0+npu:1`.

        Raises ConfigError if one is no name of a device, or they are of several kinds.
        """
        found = [(name, _DEVICE.fullmatch(name)) for name in text.split("+")]
        kinds: dict[str, None] = {}
        numbers: list[int] = []
        for name, match in found:
            if match is None:
                raise ConfigError(
                    "--devices takes names such as cpu:0, or numbers, separated by commas, or by + where one rank "
                    f"drives several, got {name!r}."
                )
            kinds[match[1]] = None
            numbers.append(int(match[2]))
        _check_one_kind(kinds)
        return cls(next(iter(kinds)), tuple(numbers))

    @property
    def names(self) -> list[str]:
        return [f"{self.kind}:{number}" for number in self.numbers]

    def __str__(self) -> str:
        return "+".join(self.names)


class BackendUnavailableError(Exception):
    """This machine or installation does not have a backend; the message says why."""


def registered_backends() -> dict[str, list[str]]:
    """Names of all installed backends, each with the packages that bring it; imports none of them."""
    return {name: [_package(it) for it in points] for name, points in registered(BACKENDS).items()}


def _package(point: EntryPoint) -> str:
    return "" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def find_backend(name: str) -> BackendEntry:
    """The entry of a backend, by name.

    Raises ConfigError: no package brings such a backend, several do, or its entry cannot be imported.
    """
    found = registered(BACKENDS)
    points = found.get(name, [])
    if not points:
        if name in AUTO_ORDER:
            raise ConfigError(
                f"the backend {name} is not registered, as Pagoda was installed by an older version; "
                "install it again."
            )
        known = ", ".join((AUTO, *AUTO_ORDER, *sorted({*found} - {*AUTO_ORDER})))
        raise ConfigError(f"--backend must be one of {known}, got {name!r}.")
    if len(points) > 1:
        packages = " and ".join(sorted(map(_package, points)))
        raise ConfigError(
            f"--backend {name} is brought by {packages}; leave one of them installed."
        )
    try:
        entry = points[0].load()
    except Exception as error:
        raise ConfigError(
            f"--backend {name} cannot be imported from {points[0].value} "
            f"({type(error).__name__}: {error}); install its package again."
        ) from error
    if not isinstance(entry, BackendEntry):
        raise ConfigError(
            f"--backend {name}: {points[0].value} must be a pagoda.devices.BackendEntry, not {entry!r}."
        )
    return entry


def candidates(wanted: str) -> Sequence[str]:
    """Names of the backends that a value of `--backend` may mean, the best first."""
    return AUTO_ORDER if wanted == AUTO else (wanted,)


def with_kind(devices: Sequence[str], backend: str) -> tuple[str, ...]:
    """The devices by their whole names: a bare number, as in `12,13` or `12+13`, is of the kind on which the value
    `backend` of `--backend` computes. Raises ConfigError: there is a bare number, and no such backend."""
    ranks = [each.split("+") for each in devices]
    if not any(name.isascii() and name.isdigit() for names in ranks for name in names):
        return tuple(devices)
    kind = find_backend(candidates(backend)[0]).device_kind
    return tuple(
        "+".join(f"{kind}:{name}" if name.isdigit() else name for name in names) for names in ranks
    )


def check_devices(devices: Sequence[str]) -> None:
    """Checks the devices of all ranks, such as `cpu:0`, or `npu:0+npu:1` where a rank drives two.

    Raises ConfigError if a name is not that of a device or is there twice, kinds differ, or some ranks drive more
    devices than others.
    """
    sets = [DeviceSet.parse(each) for each in devices]
    names = [name for each in sets for name in each.names]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigError(
            f"--devices names {', '.join(duplicates)} more than once; every rank needs a device of its own."
        )
    _check_one_kind({each.kind for each in sets})
    if len({len(each.numbers) for each in sets}) > 1:
        raise ConfigError("--devices gives some ranks more devices than others; give all as many.")


def check_backend(wanted: str, devices: Sequence[str], num_ranks: int = 1) -> None:
    """Checks that a value of `--backend` names an installed backend that computes on `--devices`, with so many
    ranks for each replica.

    `auto` without devices needs no look at what is installed. Raises ConfigError.
    """
    if wanted == AUTO and not devices:
        return
    entries = {name: find_backend(name) for name in candidates(wanted)}
    for name, entry in entries.items():
        if num_ranks > 1 and not entry.shares_ranks:
            kind = entry.device_kind
            raise ConfigError(
                f"--backend {name} shares a model out over the devices of one rank, not over ranks: leave out "
                "--tensor-parallel-size and --pipeline-parallel-size, and name devices as in "
                f"--devices {kind}:0+{kind}:1."
            )
    for each in devices:
        for name, entry in entries.items():
            check_drives(name, entry, DeviceSet.parse(each))


def check_drives(name: str, entry: BackendEntry, devices: DeviceSet) -> None:
    """Raises ConfigError: a rank of the backend cannot drive these devices."""
    if devices.kind != entry.device_kind:
        raise ConfigError(
            f"--devices names {devices}, but the {name} backend does not compute there; "
            f"name {entry.device_kind} devices."
        )
    if len(devices.numbers) > entry.max_devices:
        most = "one device" if entry.max_devices == 1 else f"{entry.max_devices} devices at most"
        raise ConfigError(
            f"--devices gives {devices} to one rank, but a rank of the {name} backend drives {most}."
        )


def _check_one_kind(kinds: Collection[str]) -> None:
    if len(kinds) > 1:
        raise ConfigError(
            f"--devices mixes {' and '.join(sorted(kinds))}; name devices of one kind."
        )


def check_devices_of_host(devices: Sequence[str], num_workers: int, threads: int | None) -> None:
    """Checks that this host has the parts of its cores that are named, if any are.

    Each worker has so many threads if that was said. Raises ConfigError if the host has fewer devices.
    """
    cores = len(os.sched_getaffinity(0))
    count = num_cpu_devices(cores, num_workers, threads)
    for device in devices:
        named = DeviceSet.parse(device)
        if named.kind == HOST_KIND and max(named.numbers) >= count:
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
