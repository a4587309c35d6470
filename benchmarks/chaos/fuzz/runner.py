# SPDX-License-Identifier: Apache-2.0
"""Fuzzes a target in a process of its own, and says what came of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.fuzz.child import INPUT_S
from benchmarks.chaos.fuzz.kernels import SANITIZED, checked_environment
from benchmarks.chaos.fuzz.target import Target

CORPUS = Path(__file__).parents[3] / "tests" / "fuzz" / "corpus"
MAX_KEPT_BYTES = 40_960
"""Bytes of a target's inputs in the repository."""
_START_S = 300
"""Seconds that a target may take to be imported with instruments, on a busy machine."""
_RUNS = re.compile(r"Done (\d+) runs|stat::number_of_executed_units: (\d+)")
_REPORT = re.compile(r"AddressSanitizer: [\w-]+|runtime error: .*|libFuzzer: [\w-]+")
_EDGES = re.compile(r"cov: (\d+)")


@dataclass(frozen=True)
class Fuzzed:
    """Result of fuzzing a target."""

    name: str
    runs: int
    edges: int
    """Places of the code that some input reached; 0 without atheris."""
    failures: tuple[str, ...]
    """The kinds of failures."""


def fuzz(target: Target, seconds: int, *, seed: int = 1, keep: Path | None = None) -> Fuzzed:
    """Fuzzes a target. A process that hangs ends, and counts as a failure.

    What computes with native kernels is fuzzed for half of the time on those that check every access, with what
    was found before. Findings are copied into `keep`, if that is given; new inputs, the smallest first, join the
    corpus as far as there is room for them.
    """
    checked = checked_environment(SANITIZED) if target.is_native else None
    with _room() as room:
        command = [sys.executable, "-m", "benchmarks.chaos.fuzz.child", target.name, str(room)]
        command += ["--corpus", str(CORPUS), "--seed", str(seed)]
        if checked is None:
            runs, edges, ended = _run(command, seconds, room)
        else:
            half = max(1, seconds // 2)
            runs, edges, ended = _run(command, half, room)
            command += ["--kernels", str(SANITIZED)]
            more_runs, _, more_ended = _run(command, half, room, checked)
            runs, ended = runs + more_runs, [*ended, *more_ended]
        kinds = [path.read_text(encoding="utf-8").partition("\n")[0] for path in _told(room)]
        if keep is not None:
            _keep(room, keep, target.name)
        return Fuzzed(target.name, runs, edges, (*kinds, *ended))


def _run(
    command: list[str], seconds: int, room: Path, environment: dict[str, str] | None = None
) -> tuple[int, int, list[str]]:
    """Runs, edges and how the process ended, if it did not end well."""
    log = room / "log"
    limit_s = seconds + _START_S + 3 * INPUT_S
    command = [*command, "--seconds", str(seconds)]
    try:
        with log.open("wb") as out:
            done = subprocess.run(
                command, stdout=out, stderr=out, timeout=limit_s, check=False, env=environment
            )
        ended = f"the process ended with {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        ended = "the process hangs"
    text = log.read_text(encoding="utf-8", errors="replace")
    if ended:
        ended += "".join(f" ({it})" for it in _REPORT.findall(text)[:1])
        if (room / "last").exists():
            shutil.copy(room / "last", room / "findings" / "last.input")
    runs = max((int(a or b) for a, b in _RUNS.findall(text)), default=0)
    edges = max(map(int, _EDGES.findall(text)), default=0)
    return runs, edges, [ended] if ended else []


def _told(room: Path) -> list[Path]:
    return sorted((room / "findings").glob("*.txt"))


def _keep(room: Path, keep: Path, name: str) -> None:
    """Copies findings, and the log if there are any; lets the corpus grow."""
    found = list((room / "findings").iterdir())
    if found:
        shutil.copytree(room / "findings", keep / name, dirs_exist_ok=True)
        shutil.copy(room / "log", keep / name / "log")
    home = CORPUS / name
    left = MAX_KEPT_BYTES - sum(path.stat().st_size for path in home.iterdir())
    for path in sorted((room / "inputs").iterdir(), key=lambda it: it.stat().st_size):
        left -= path.stat().st_size
        if left < 0:
            return
        shutil.copy(path, home / path.name)


@contextmanager
def _room() -> Iterator[Path]:
    """A directory in memory, where that is possible: files are written thousands of times a second."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="pagoda-fuzz-", dir=shared if shared.is_dir() else None, ignore_cleanup_errors=True
    ) as room:
        yield Path(room)
