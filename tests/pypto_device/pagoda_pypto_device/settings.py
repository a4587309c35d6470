# SPDX-License-Identifier: Apache-2.0
"""What tests tell the device, in an environment variable that worker processes inherit."""

from __future__ import annotations

import os

import msgspec

VARIABLE = "PAGODA_PYPTO_DEVICE"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How the device is built and how it behaves."""

    contracts: tuple[str, ...] = ("tiny-fp32",)
    """Names among `contracts.SHAPES`."""
    seed: int = 0
    chips: int = 4
    memory_bytes: int = 1 << 30
    """Of each chip."""
    failure_rate: float = 0.0
    """Share of calls at which the chips fail."""
    timeout_rate: float = 0.0
    """Share of calls that never end, which the runtime tells as a time-out."""
    fail_at: tuple[int, ...] = ()
    """Numbers of calls at which the chips fail, counted over all workers that write to one `log`."""
    late_rate: float = 0.5
    """Share of calls that run only when their result is awaited."""
    log: str = ""
    """Directory to which calls and wrong arguments are written; empty for none."""
    schema_version: int = 1
    driver: str | None = "25.2.1"
    """None of a host without a driver."""


def read_settings() -> Settings:
    """The settings of this process."""
    return msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=Settings)
