# SPDX-License-Identifier: Apache-2.0
"""Kernel libraries: how the installed one is found, and what Pagoda calls of it and of PyPTO's runtime.

A package brings a library by an entry point of the group `pagoda.pypto_kernels`, whose object has the methods of
`KernelLibrary`. Its workers have the methods of PyPTO's `DistributedWorker` (`pypto.runtime`) that Pagoda calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from pagoda.devices import BackendUnavailableError, DeviceSet
from pagoda.plugins.pypto.contract import LibraryManifest, Topology, read_manifest
from pagoda.registry import registered

ENTRY_POINTS = "pagoda.pypto_kernels"
ROOT_ENV = "PYPTO_LIB_ROOT"
"""Environment variable with a checkout of pypto-lib, whose kernels are taken where no package brings others."""
OWN_POINT = "pypto-lib"
"""Name of Pagoda's own entry point (`pagoda.plugins.pypto.pypto_lib`)."""


class DeviceTensor(Protocol):
    """Memory of a chip; views are made by its class from (data_ptr, shape, dtype)."""

    @property
    def data_ptr(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class RunHandle(Protocol):
    """A program that was submitted."""

    device_ns: int
    """Nanoseconds that it took by the clock of the chips; known behind `result`."""

    def result(self) -> None:
        """Returns when the program has ended, and lets other threads run. Raises what went wrong."""


class DistributedWorker(Protocol):
    """The processes that drive some chips, forked when the worker is opened.

    They see memory of the host that was shared before that, and no other. Runs and copies take place in the order
    in which they were submitted. `worker_id` is the number of a chip among the worker's own.
    """

    def alloc_tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        init: torch.Tensor | None = None,
        worker_id: int = 0,
    ) -> DeviceTensor:
        """Memory of a chip, which holds `init` or anything. Raises RuntimeError: there is too little."""

    def free_tensor(self, tensor: DeviceTensor, *, worker_id: int = 0) -> None: ...

    def copy_to(self, dst: int, src: int, nbytes: int, *, worker_id: int = 0) -> None:
        """Copies from an address of the host to one of the chip."""

    def copy_from(self, dst: int, src: int, nbytes: int, *, worker_id: int = 0) -> None:
        """Copies from an address of the chip to one of the host."""

    def submit(self, program: object, *args: object) -> RunHandle:
        """Begins a program behind all before it; `args` are tensors of the host or of chips, in order."""

    def device_memory_info(self, worker_id: int = 0) -> tuple[int, int]:
        """Free bytes and all bytes of a chip."""

    def committed_device_memory(self, worker_id: int = 0) -> int:
        """Bytes of a chip that the worker holds: weights, caches, rings and arenas."""

    def close(self) -> None: ...


class KernelLibrary(Protocol):
    """Programs, with what they need to be compiled and run."""

    def manifest(self) -> Mapping[str, object]:
        """The library's contracts as data; see `contract.read_manifest`."""

    def driver_version(self) -> str:
        """Version of the driver, such as `25.2.1`. Raises OSError: there is none."""

    def num_chips(self) -> int:
        """Chips of this host."""

    def memory_info(self, chip: int) -> tuple[int, int]:
        """Free bytes and all bytes of a chip that no worker of this process drives."""

    def compile(
        self, contract: str, program: str, chips: Sequence[int], topology: Topology
    ) -> object:
        """A program as workers take it. Raises RuntimeError: it cannot be compiled."""

    def open_worker(self, programs: Sequence[object], chips: Sequence[int]) -> DistributedWorker:
        """Forks the processes of some chips for these programs."""

    def stack(self, shards: Sequence[DeviceTensor]) -> object:
        """One argument of tensors on all chips of a worker, in their order."""


def open_library(devices: DeviceSet) -> tuple[KernelLibrary, LibraryManifest]:
    """The kernel library that is installed, for chips that this host has.

    Raises BackendUnavailableError, whose text is one sentence without its full stop.
    """
    found = registered(ENTRY_POINTS)
    own = found.pop(OWN_POINT, []) if os.environ.get(ROOT_ENV) else []
    points = [point for name in found if name != OWN_POINT for point in found[name]] or own
    if not points:
        raise BackendUnavailableError(
            f"no installed package brings PyPTO kernels (an entry point of the group {ENTRY_POINTS}), and "
            f"{ROOT_ENV} names no checkout of pypto-lib"
        )
    if len({point.value for point in points}) > 1:
        values = " and ".join(sorted({point.value for point in points}))
        raise BackendUnavailableError(
            f"several packages bring PyPTO kernels ({values}); leave one installed"
        )
    try:
        library: KernelLibrary = points[0].load()
    except Exception as error:
        raise BackendUnavailableError(
            f"the PyPTO kernels {points[0].value} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    try:
        manifest = read_manifest(library.manifest())
    except ValueError as error:
        raise BackendUnavailableError(str(error)) from None
    _check_driver(library, manifest)
    chips = library.num_chips()
    if max(devices.numbers) >= chips:
        known = {0: "no chip", 1: "the chip npu:0 alone"}.get(
            chips, f"chips npu:0 to npu:{chips - 1}"
        )
        raise BackendUnavailableError(f"--devices names {devices}, but this host has {known}")
    return library, manifest


def _check_driver(library: KernelLibrary, manifest: LibraryManifest) -> None:
    try:
        version = library.driver_version()
    except OSError as error:
        raise BackendUnavailableError(f"there is no Ascend driver here ({error})") from None
    wanted = manifest.driver
    if not _numbers(wanted.at_least) <= _numbers(version) < _numbers(wanted.below):
        raise BackendUnavailableError(
            f"{manifest.library} needs an Ascend driver from {wanted.at_least} to below {wanted.below}, "
            f"this host has {version}"
        )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
