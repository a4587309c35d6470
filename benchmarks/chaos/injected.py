# SPDX-License-Identifier: Apache-2.0
"""Faults that a server was asked to inject, and those that it has."""

from __future__ import annotations

from typing import IO


def check_faults(schedule: str, log: IO[bytes]) -> None:
    """Raises RuntimeError: a fault of the schedule is not in the log of the server, so nothing was tried."""
    log.seek(0)
    told = log.read().decode(errors="replace")
    missing = [entry for entry in schedule.split() if f"injects a fault: {entry}" not in told]
    if missing:
        raise RuntimeError(f"These faults have not come: {', '.join(missing)}")
