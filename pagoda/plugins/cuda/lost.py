# SPDX-License-Identifier: Apache-2.0
"""Errors of a device that has failed, told apart from those of a request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagoda.backend.base import DeviceLostError
from pagoda.plugins.cuda.runtime import Runtime


@contextmanager
def device_errors(runtime: Runtime) -> Iterator[None]:
    """Raises DeviceLostError in place of a RuntimeError that comes of a device's failure.

    A kernel's fault is reported by whatever is asked of the device next, which may be another request's.
    """
    try:
        yield
    except RuntimeError as error:  # torch and Triton have no other for what the driver says
        if runtime.is_lost():
            raise DeviceLostError(f"{runtime.name} has failed: {error}") from error
        raise
