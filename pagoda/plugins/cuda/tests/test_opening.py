# SPDX-License-Identifier: Apache-2.0
"""One sentence says what the backend of GPUs lacks on a machine."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import triton

from pagoda.devices import BackendUnavailableError, DeviceSet, find_backend
from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.plugins.cuda.opening import check_device, open_backend

ONE = DeviceSet("cuda", (0,))


def test_the_backend_is_registered() -> None:
    entry = find_backend("cuda")
    assert (entry.module, entry.device_kind, entry.max_devices) == (
        "pagoda.plugins.cuda.opening",
        "cuda",
        1,
    )


def test_the_interpreter_opens_the_emulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend = open_backend(ONE)
    named = f"cuda (emulated in Triton's interpreter, Triton {triton.__version__})"
    assert backend.arithmetic == named
    assert backend.memory is not None
    assert backend.capabilities.weight_formats[:2] == EmulatedDevice().number_formats


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "triton" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(
        BackendUnavailableError, match=r"Triton is not installed.*pagoda-llm\[cuda\]"
    ):
        open_backend(ONE)


@pytest.mark.parametrize(
    ("cuda", "hip", "devices", "capability", "number", "message"),
    [
        (None, None, 0, (9, 0), 0, "is built for CPUs; install one that is built for CUDA or ROCm"),
        ("13.0", None, 0, (9, 0), 0, "finds no GPU, or a driver too old for its CUDA 13.0"),
        (None, "7.0", 0, (9, 0), 0, "finds no GPU, or a driver too old for its ROCm 7.0"),
        ("13.0", None, 1, (9, 0), 1, "there is no cuda:1; this machine has cuda:0"),
        ("13.0", None, 4, (9, 0), 7, "there is no cuda:7; this machine has cuda:0 to cuda:3"),
        ("13.0", None, 1, (7, 5), 0, "Old has compute capability 7.5, but 8.0 .* is the least"),
    ],
)
def test_one_sentence_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    hip: str | None,
    devices: int,
    capability: tuple[int, int],
    number: int,
    message: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old")
    with pytest.raises(BackendUnavailableError, match=message):
        check_device(number)
