"""Compilation of kernels for NVIDIA's and AMD's GPUs, on a machine that has neither."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

AHEAD = Path(__file__).with_name("ahead.py")
SAMPLE = ("low_rank", "attention bfloat16 64")
"""Launches that are compiled; `python tests/backend/cuda/kernels/ahead.py` compiles all of them, in minutes."""


def run(cache: Path, *names: str) -> str:
    """Output of `ahead.py`, without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, AHEAD, *names],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_all_kernels_are_translated(tmp_path: Path) -> None:
    """The interpreter takes much that the compiler refuses."""
    count, *words = run(tmp_path, "translate").split()
    assert int(count) > 200
    assert words == ["kernels", "for", "H100,", "MI300"]


def test_some_are_compiled(tmp_path: Path) -> None:
    made = run(tmp_path, *SAMPLE)
    for name in ("low_rank: _narrow", "attention bfloat16 64: _attend"):
        assert f"{name} for H100" in made
        assert f"{name} for MI300" in made
