# SPDX-License-Identifier: Apache-2.0
"""A measured figure beside what was promised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    what: str
    measured: str
    target: str
    command: str
    """Runs this measurement alone."""
