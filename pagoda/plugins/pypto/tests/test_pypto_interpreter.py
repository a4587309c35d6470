# SPDX-License-Identifier: Apache-2.0
"""Kernels in CANN's PyPTO give the reference's values inside a serving step, by its graph interpreter."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANCE = 1e-5
_PACKAGE = importlib.util.find_spec("pypto")


@pytest.mark.skipif(
    _PACKAGE is None or _PACKAGE.origin is None,
    reason="the package pypto of CANN is not installed: pip install --no-deps pypto==0.2.0",
)
@pytest.mark.timeout(1200)  # the first time, the interpreter's library is compiled
def test_kernels_have_the_values_of_the_reference(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert request.config.cache is not None
    calculator = request.config.cache.mkdir("pypto-calculator")
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, str(script), str(calculator)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same_tokens"]
    assert [len(found["norm"]), len(found["product"])] == [1, 1]
    assert max(*found["norm"], *found["product"], found["layer"]) < TOLERANCE
    assert set(found["verdicts"]) == {"PASS"}
    assert len(found["verdicts"]) >= 3
