# SPDX-License-Identifier: Apache-2.0
"""The heap of a process that has loaded what it will serve with."""

from __future__ import annotations

import ctypes
import gc


def settle_heap() -> None:
    """Exempts all objects that are there from garbage collection, which it turns on, and gives freed memory back.

    A full collection of what was loaded would take longer than many steps.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    trim_heap()


def trim_heap() -> None:
    """Gives freed memory back to the machine.

    The heap has gaps where weights lay on their way through it, hundreds of megabytes, which the C library (glibc)
    returns only when asked.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
