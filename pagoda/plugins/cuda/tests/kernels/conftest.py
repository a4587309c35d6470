# SPDX-License-Identifier: Apache-2.0
"""Kernels are imported for Triton's interpreter, also those that the backend does not import itself."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil

import pytest

from pagoda.plugins.cuda import kernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON else ["*"]
if HAS_TRITON:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
            importlib.import_module(module.name)
