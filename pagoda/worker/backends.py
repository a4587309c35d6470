# SPDX-License-Identifier: Apache-2.0
"""Choice of the backend that a worker computes with.

`python -m pagoda.worker.backends [MODEL LOAD_FORMAT DTYPE QUANTIZATION]` says what there is: `pagoda doctor`,
which never loads torch, asks that way. Each line is a name and what it computes with, or why it cannot; the last
line is that of `auto` alone, with what a worker plans for the model. It ends with an error where that has no room.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pagoda.backend.base import Backend, UnsupportedError, check_operations
from pagoda.backend.cpu.native import unused_amx
from pagoda.checkpoints.model_spec import ModelSpec
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
from pagoda.ipc.machine import available_cores, format_bytes
from pagoda.messages.speculation import HEAD_IF_ANY
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.needed_operations import needed_operations

DevicesOf = Callable[[str], DeviceSet]
"""Gives the devices of this rank, for a backend that computes on devices of a kind."""


def first_device(kind: str) -> DeviceSet:
    """The device of a rank that is alone."""
    return DeviceSet(kind, (0,))


def choose_backend(
    wanted: str, devices_of: DevicesOf = first_device
) -> tuple[Backend[Any, Any], str]:
    """The backend of a rank, which has joined no group yet, and one line about it for the operator.

    `auto` takes the first backend of `AUTO_ORDER` that this machine has.
    Raises ConfigError: there is no such backend here, or it does not compute on the rank's devices."""
    missing: list[str] = []
    for name in candidates(wanted):
        entry = find_backend(name)
        devices = devices_of(entry.device_kind)
        check_drives(name, entry, devices)
        try:
            module = importlib.import_module(entry.module)
            backend: Backend[Any, Any] = module.open_backend(devices)
        except BackendUnavailableError as error:
            missing.append(f"not the {name} backend: {error}")
            reason = str(error)
        else:
            threads = torch.get_num_threads()
            line = f"{backend.arithmetic}, {threads} thread{'s' if threads > 1 else ''}"
            return backend, " ".join((line, *(f"({why})" for why in missing)))
    raise ConfigError(f"--backend {wanted} is not available: {reason}.")


_LIMITS = {
    "max_experts": ("experts in a layer", "num_experts, num_local_experts or n_routed_experts"),
    "max_conv_width": (
        "tokens under a convolution",
        "conv_L_cache, linear_conv_kernel_dim, mamba_d_conv or conv_kernel",
    ),
    "max_delta_key_dim": ("elements in a key of a delta rule", "linear_key_head_dim"),
    "max_scan_state": (
        "elements in a state of a Mamba layer",
        "mamba_d_state, ssm_state_size or state_size",
    ),
}
"""Limits among `Capabilities`: what they count, and the keys of config.json that say how many a model has."""


def check_model(spec: ModelSpec, backend: Backend[Any, Any]) -> None:
    """Raises UnsupportedError: the backend lacks an operation of the model, which may be too large for it, too."""
    known, name = backend.capabilities, backend.arithmetic
    check_operations(needed_operations(spec), known, name)
    for limit, size in _sizes(spec):
        most, (what, keys) = getattr(known, limit), _LIMITS[limit]
        if most is not None and size > most:
            raise UnsupportedError(
                f"{name} computes at most {most} {what} ({keys} of config.json), but the model has {size}; "
                "choose another --backend."
            )
        if limit == "max_delta_key_dim" and size % known.delta_key_multiple:
            raise UnsupportedError(
                f"{name} computes a multiple of {known.delta_key_multiple} {what} ({keys} of config.json), "
                f"but the model has {size}; choose another --backend."
            )


def _sizes(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Sizes of a model by the limits that they have to keep."""
    if spec.experts is not None:
        yield "max_experts", spec.experts.routing.num_experts
    for kind in {layer.kind for layer in spec.layers if layer.kind is not None}:
        yield from kind.limits.items()


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(available_cores())
    known = registered_backends()
    for name in (*AUTO_ORDER, *sorted(known.keys() - {*AUTO_ORDER})):
        packages = "" if name in AUTO_ORDER else f" ({' and '.join(known[name])})"
        print(f"{name}{packages}: {_described(name)}")
    print(_planned(*arguments) if arguments else choose_backend(AUTO)[1])


def _planned(model: str, load_format: str, dtype: str, quantization: str) -> str:
    """The backend and the memory of a worker that loads the model. Raises ConfigError: it cannot."""
    from pagoda.worker.loading import plan_worker

    plan = plan_worker(
        WorkerConfig(
            model=model,
            load_format=load_format,
            dtype=dtype,
            quantization=quantization,
            drafter=HEAD_IF_ANY,
        )
    )
    total = plan.total_bytes(plan.weight_bytes, plan.step_bytes, plan.num_blocks)
    cache = format_bytes(plan.num_blocks * plan.bytes_per_block)
    head = "" if plan.drafter is None else " and a head that drafts"
    return f"{plan.backend_summary}, in {format_bytes(total)} of memory with a KV cache of {cache}{head}"


def _described(name: str) -> str:
    try:
        line = choose_backend(name)[1]
        obstacle = unused_amx() if name == "cpu" else None
        return line if obstacle is None else f"{line} (without AMX: {obstacle})"
    except ConfigError as error:
        return str(error).removesuffix(".")
    except Exception as error:  # of a package that is not Pagoda's
        return f"cannot be opened ({type(error).__name__}: {error})"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
