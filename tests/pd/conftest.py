"""Tests of handoff use the engine of the engine's tests, and the processes of those of whole systems."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("engine", "e2e"):
    sys.path.insert(0, str(Path(__file__).parent.parent / room))
