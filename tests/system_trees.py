# SPDX-License-Identifier: Apache-2.0
"""Directories that stand for /sys/devices of other machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_system(root: Path, files: Mapping[str, str]) -> Path:
    """Writes files by their paths; returns the root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root
