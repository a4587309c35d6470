# SPDX-License-Identifier: Apache-2.0
"""The row of fuzzing in the table of reliability."""

from __future__ import annotations

from pathlib import Path

from benchmarks.chaos.fuzz.kernels import SANITIZED, checked_environment
from benchmarks.chaos.fuzz.runner import fuzz
from benchmarks.chaos.fuzz.targets import TARGETS
from benchmarks.chaos.trial import Outcome, Trial

_SECONDS, _SHORT_SECONDS = 600, 1
_SHORT_TARGETS = ("hosts_file", "flags_yaml")
_KEEP = Path(__file__).parents[3] / "build" / "fuzz"
"""Directory for findings of the long form, in which the corpus grows, too."""


def _run(short: bool) -> Outcome:
    seconds, names = (_SHORT_SECONDS, _SHORT_TARGETS) if short else (_SECONDS, tuple(TARGETS))
    done = [fuzz(TARGETS[name], seconds, keep=None if short else _KEEP) for name in names]
    failures = [f"{it.name}: {'; '.join(it.failures)}" for it in done if it.failures]
    runs, edges = sum(it.runs for it in done), sum(it.edges for it in done)
    covered = f", {edges:,} edges covered" if edges else ", blindly: atheris is not installed"
    said = f"{len(done)} targets, {seconds} s each: {runs:,} inputs{covered}, "
    failures += [f"{it.name}: no input was tried" for it in done if not it.runs]
    is_checked = checked_environment(SANITIZED) is not None
    if not is_checked:
        said += "kernels that check no access, "
    holds = not failures and (short or (is_checked and all(it.edges for it in done)))
    return Outcome(said + ("; ".join(failures) or "no failure"), holds)


FUZZ = Trial(
    "fuzz",
    "inputs changed at random, guided by coverage: model files, adapters, templates, tokenizers, KV on disk, "
    "traces, lists of hosts, flags, HTTP, frames of every socket between processes; native kernels behind them",
    "no crash, no error but a sentence, no hang (10 s), at most 512 MiB more memory",
    _run,
    limit_s=8 * 3600.0,
)
