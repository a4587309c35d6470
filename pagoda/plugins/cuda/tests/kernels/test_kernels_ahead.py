# SPDX-License-Identifier: Apache-2.0
"""Compilation of kernels for NVIDIA's and AMD's GPUs, on a machine that has neither."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

AHEAD = Path(__file__).with_name("ahead.py")
SAMPLE = "attention bfloat16 64"
"""Launch that is compiled; `python pagoda/plugins/cuda/tests/kernels/ahead.py` compiles all, in minutes."""


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


def test_all_kernels_are_translated_and_some_compiled(tmp_path: Path) -> None:
    """The interpreter takes much that the compiler refuses."""
    first, *made = run(tmp_path, "translate", SAMPLE).splitlines()
    count, rest = first.split(maxsplit=1)
    assert int(count) > 200
    assert rest == "kernels for H100, MI300"
    for target in ("H100", "MI300"):
        assert any(line.startswith(f"{SAMPLE}: _attend for {target}, ") for line in made)
