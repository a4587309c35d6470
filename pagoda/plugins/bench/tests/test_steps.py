# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench steps`, and a fit to what it has measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def _pagoda(*arguments: object) -> str:
    command = [sys.executable, "-m", "pagoda", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_steps_of_one_replica_and_of_several_at_once(tmp_path: Path) -> None:
    measured, fitted = tmp_path / "steps.jsonl", tmp_path / "steps.json"
    small = ("--batches", 1, 2, "--contexts", 16, 32, "--prompts", 16, 32)
    few = ("--num-steps", 4, "--rounds", 1, "--threads", 1, "--replicas", 2)
    assert "pagoda-tiny" in _pagoda("bench", "steps", *small, *few, "--output", measured)
    samples = [json.loads(line) for line in measured.read_text().splitlines()]
    # Four kinds that decode, and two prompts alone, beside one request, and beside one once more.
    assert [it["replicas"] for it in samples] == [1] * 8 + [2] * 4
    for sample in samples:
        assert 0 < sample["worker_s"]
        assert 0 < sample["engine_s"]
        assert 0 < sample["frontend_s"]
    together = {it["num_seqs"] for it in samples if it["replicas"] == 2 and it["num_requests"] == 0}
    assert together == {1, 2}
    assert "threads a core" in _pagoda("simulate", "fit", measured, "--output", fitted)
    [alone, beside] = json.loads(fitted.read_text())["slowdowns"]
    assert beside["load"] == 2 * alone["load"]
    assert beside["worker"]["share"] >= 1
