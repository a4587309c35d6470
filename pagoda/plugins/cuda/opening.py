# SPDX-License-Identifier: Apache-2.0
"""Opening of the backend: what it needs, and one sentence where that is not here."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch

from pagoda.devices import BackendUnavailableError, DeviceSet

if TYPE_CHECKING:
    from pagoda.plugins.cuda.backend import GpuBackend
    from pagoda.plugins.cuda.runtime import Runtime

_INTERPRET = "TRITON_INTERPRET"
"""Variable of the environment by which Triton runs kernels on the CPU; here it emulates the device with them."""
_FUSION = ("TRITON_DEFAULT_FP_FUSION", "1")
"""Lets Triton join products and sums in kernels that do not forbid it: as of 3.10 it does not by itself."""
_LEAST_CAPABILITY = (8, 0)
"""Compute capability of the oldest NVIDIA GPU that multiplies bfloat16 (Ampere)."""


def open_backend(devices: DeviceSet) -> GpuBackend:
    """Opens the GPU of that number.

    Raises BackendUnavailableError: torch, Triton, the driver or the GPU is not here, or too old.
    """
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError(
            "Triton is not installed, in which its kernels are written; pip install 'pagoda-llm[cuda]'"
        )
    from pagoda.plugins.cuda.backend import GpuBackend

    return GpuBackend(_open_runtime(*devices.numbers))


def _open_runtime(number: int) -> Runtime:
    if os.environ.get(_INTERPRET) == "1":
        from pagoda.plugins.cuda.emulation import EmulatedDevice

        return EmulatedDevice()
    check_device(number)
    os.environ.setdefault(*_FUSION)
    from pagoda.plugins.cuda.torch_runtime import TorchRuntime

    return TorchRuntime(number)


def check_device(number: int) -> None:
    """Raises BackendUnavailableError: there is no such GPU that this torch computes on."""
    if torch.version.cuda is None and torch.version.hip is None:
        raise BackendUnavailableError(
            f"torch {torch.__version__} is built for CPUs; install one that is built for CUDA or ROCm"
        )
    if not torch.cuda.is_available():
        wanted = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        raise BackendUnavailableError(
            f"torch finds no GPU, or a driver too old for its {wanted}; nvidia-smi or rocm-smi says which"
        )
    count = torch.cuda.device_count()
    if number >= count:
        known = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise BackendUnavailableError(f"there is no cuda:{number}; this machine has {known}")
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(number)
        if capability < _LEAST_CAPABILITY:
            name, (major, minor) = torch.cuda.get_device_name(number), capability
            raise BackendUnavailableError(
                f"{name} has compute capability {major}.{minor}, but 8.0 (Ampere) is the least"
            )
