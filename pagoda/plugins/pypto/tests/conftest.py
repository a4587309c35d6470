# SPDX-License-Identifier: Apache-2.0
"""The model of the device, on the path of tests and of the processes that they start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pypto_rig import Rig, load_rig
from restored_threads import threads_restored

from pagoda.telemetry.tracer import Tracer

PACKAGE = Path(__file__).parents[4] / "tests" / "pypto_device"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs the device with settings of `pagoda_pypto_device.settings`."""

    def install_with(**settings: object) -> None:
        monkeypatch.setenv("PAGODA_PYPTO_DEVICE", json.dumps(settings))

    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE), prepend=os.pathsep)
    install_with()
    return install_with


@pytest.fixture
def rig(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    """Loads pagoda-tiny on the device with some settings."""

    def load(tracer: Tracer | None = None, **settings: object) -> Rig:
        return load_rig(install, monkeypatch, tracer or Tracer("test"), **settings)

    return load


__all__ = ["threads_restored"]
