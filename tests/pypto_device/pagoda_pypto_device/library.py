# SPDX-License-Identifier: Apache-2.0
"""The kernel library of the device, as `pagoda.plugins.pypto.library.KernelLibrary` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagoda.plugins.pypto.contract import Contract, ProgramName, Topology, read_manifest
from pagoda_pypto_device.contracts import manifest
from pagoda_pypto_device.memory import DeviceTensor, StackedDeviceTensor
from pagoda_pypto_device.settings import read_settings
from pagoda_pypto_device.worker import DistributedWorker


@dataclass(frozen=True)
class CompiledProgram:
    """A program for some chips."""

    contract: Contract
    name: ProgramName
    chips: tuple[int, ...]
    topology: Topology


class Library:
    def manifest(self) -> Mapping[str, object]:
        settings = read_settings()
        return manifest(settings.contracts, settings.schema_version)

    def driver_version(self) -> str:
        version = read_settings().driver
        if version is None:
            raise FileNotFoundError("/dev/davinci_manager is missing")
        return version

    def num_chips(self) -> int:
        return read_settings().chips

    def memory_info(self, chip: int) -> tuple[int, int]:
        settings = read_settings()
        if chip >= settings.chips:
            raise RuntimeError(f"there is no chip {chip}")
        return settings.memory_bytes, settings.memory_bytes

    def compile(
        self, contract: str, program: ProgramName, chips: Sequence[int], topology: Topology
    ) -> CompiledProgram:
        known = read_manifest(self.manifest()).contracts
        found = next(each for each in known if each.name == contract)
        if topology not in found.topologies or topology.chips != len(chips):
            raise RuntimeError(f"{contract} has no such topology")
        return CompiledProgram(found, program, tuple(chips), topology)

    def open_worker(
        self, programs: Sequence[CompiledProgram], chips: Sequence[int]
    ) -> DistributedWorker:
        if any(program.chips != tuple(chips) for program in programs):
            raise RuntimeError("a program was compiled for other chips")
        return DistributedWorker(programs, chips, read_settings())

    def stack(self, shards: Sequence[DeviceTensor]) -> StackedDeviceTensor:
        return StackedDeviceTensor(tuple(shards))


LIBRARY = Library()
