# SPDX-License-Identifier: Apache-2.0
"""Kernels of the GPU backend run in Triton's interpreter, which has to be chosen before they are imported."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
from restored_threads import threads_restored

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["*"]
if HAS_TRITON:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        importlib.import_module("pagoda.plugins.cuda.backend")
        emulation = importlib.import_module("pagoda.plugins.cuda.emulation")
        emulation.sum_in_float64()


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of Triton are imported by the first launch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


__all__ = ["threads_restored"]
