# SPDX-License-Identifier: Apache-2.0
"""The library of native kernels, where it is installed, and what it has for this CPU."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from pagoda.backend.sampling_table import COLUMNS
from pagoda.devices import BackendUnavailableError
from pagoda.errors import ConfigError

INSTRUCTION_SET_ENV = "PAGODA_CPU_ISA"
"""Environment variable that forces an instruction set: `avx2`, `avx512`, `avx512_vnni`, `avx512_bf16`, `amx`, or
`amx_emulated` to test the kernels of `amx` elsewhere."""


def available_instruction_sets() -> list[str]:
    """Instruction sets that kernels exist for on this CPU, from the lowest to the highest.
    Raises BackendUnavailableError: the kernels are not installed, or the CPU has none of their instruction sets.
    """
    names: list[str] = load_native().instruction_sets()
    if not names:
        raise BackendUnavailableError("this CPU has no AVX2")
    return names


def emulated_instruction_sets() -> list[str]:
    """AMX in other instructions, where this CPU has these: far slower, with the same results to the bit.
    Raises BackendUnavailableError: the kernels are not installed."""
    native = load_native()
    return [native.EMULATED_AMX] if "avx512_bf16" in native.instruction_sets() else []


def unused_amx() -> str | None:
    """Reason why a processor's AMX is not used; None where it is, or there is none.
    Raises BackendUnavailableError: the kernels are not installed."""
    native = load_native()
    return (native.amx_obstacle() or None) if native.has_amx() else None


def choose_instruction_set() -> str:
    """The highest one, or what the environment says.

    Raises BackendUnavailableError if the kernels are not installed, ConfigError if the environment names an
    instruction set that this CPU lacks, or AMX where this process may not use it.
    """
    names = available_instruction_sets()
    wanted = os.environ.get(INSTRUCTION_SET_ENV)
    if wanted is None:
        return names[-1]
    if wanted not in (*names, *emulated_instruction_sets()):
        known = ", ".join(names)
        if wanted == "amx":
            obstacle = load_native().amx_obstacle()
            raise ConfigError(f"{INSTRUCTION_SET_ENV}=amx cannot be: {obstacle}; give {known}.")
        raise ConfigError(
            f"{INSTRUCTION_SET_ENV} must be one of {known} on this CPU, got {wanted!r}."
        )
    return wanted


def load_native() -> ModuleType:
    """Loads the kernels in a process that has loaded torch first, so that both share one OpenMP library.
    Raises BackendUnavailableError: it is not installed, or cannot be loaded."""
    try:
        native = importlib.import_module("pagoda.backend._native")
    except ModuleNotFoundError:
        raise BackendUnavailableError(
            "the kernels were not built when Pagoda was installed; "
            "that takes a C++20 compiler with OpenMP and Python's header files, on x86-64 or 64-bit ARM"
        ) from None
    except ImportError as error:
        raise BackendUnavailableError(f"the kernels cannot be loaded: {error}") from None
    if getattr(native, "SAMPLING_COLUMNS", None) != COLUMNS:
        raise BackendUnavailableError("the kernels are of another version; install Pagoda again")
    return native
