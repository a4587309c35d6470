# SPDX-License-Identifier: Apache-2.0
"""Plugins that merge traces: objects of the entry-point group `pagoda.trace_mergers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TraceMerger:
    """Makes one file of a trace."""

    merge: Callable[[Path, str], Path]
    """Merges the fragments of a run in a directory; returns the path of the file.
    Raises ConfigError: there is nothing to merge, or the file cannot be written."""
