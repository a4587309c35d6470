# SPDX-License-Identifier: Apache-2.0
"""The kernels that check every access, where `make test-native` has built them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

SANITIZED = Path(__file__).parents[3] / "build" / "sanitized" / "pagoda" / "backend"
_MODULE = "pagoda.backend._native"
_MAX_MIB = 4096
"""Memory of a process, whose address space cannot be limited: the sanitizers take terabytes of that."""
_LIBRARY = re.compile(r"lib(?:asan|ubsan)\S* => (\S+)")


def load_kernels(directory: Path) -> None:
    """Loads the kernels built in a directory in place of the installed ones, under their name.
    Raises ImportError: there are none, or Python cannot load them."""
    import torch  # noqa: F401 - it brings the OpenMP library that the kernels share

    path = next(directory.glob("_native*.so"), None)
    if path is None:
        raise ImportError(f"there is no _native*.so in {directory}.")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python cannot load {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def checked_environment(directory: Path) -> dict[str, str] | None:
    """The environment of a process that loads the kernels in `directory`; None where there are none that check."""
    path = next(directory.glob("_native*.so"), None)
    if path is None:
        return None
    told = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False).stdout
    libraries = _LIBRARY.findall(told)
    if not libraries:
        return None
    limits = f"allocator_may_return_null=1:hard_rss_limit_mb={_MAX_MIB}"
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": f"detect_leaks=0:halt_on_error=1:{limits}",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
