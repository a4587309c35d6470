"""Compilation of kernels for NVIDIA's and AMD's GPUs, on a machine that has neither."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

AHEAD = Path(__file__).with_name("ahead.py")
SAMPLE = ("blocks", "low_rank", "attention bfloat16 64")
"""Launches that compile in a few seconds; `python tests/backend/cuda/kernels/ahead.py` compiles all of them."""


def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """The interpreter takes much that the compiler refuses."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, AHEAD, *SAMPLE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in SAMPLE:
        assert f"{name}: " in done.stdout
    assert "_attend for H100" in done.stdout
    assert "_attend for MI300" in done.stdout
