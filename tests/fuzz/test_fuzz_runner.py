# SPDX-License-Identifier: Apache-2.0
"""Fuzzing itself: a process runs, counts and keeps what fails."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.chaos.fuzz import trial
from benchmarks.chaos.fuzz.child import Findings, guarded
from benchmarks.chaos.fuzz.forms import JSON, mutator
from benchmarks.chaos.fuzz.runner import Fuzzed, fuzz
from benchmarks.chaos.fuzz.target import Target
from benchmarks.chaos.fuzz.targets import TARGETS


def test_a_target_is_fuzzed_in_a_process_of_its_own() -> None:
    done = fuzz(TARGETS["hosts_file"], 1)
    assert done.failures == ()
    assert done.runs > 10
    if find_spec("atheris") is not None:
        assert done.edges > 10, "the code of this installation is not instrumented"


def test_the_short_form_of_the_trial_holds() -> None:
    outcome = trial.FUZZ.run(True)
    assert outcome.holds, outcome.measured


def test_the_long_form_keeps_findings_and_falls_short_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Path | None] = []
    failures: dict[str, tuple[str, ...]] = {}

    def fuzzed(target: Target, seconds: int, *, keep: Path | None = None) -> Fuzzed:
        assert seconds == 600
        kept.append(keep)
        return Fuzzed(target.name, 10, 10, failures.get(target.name, ()))

    monkeypatch.setattr(trial, "fuzz", fuzzed)
    monkeypatch.setattr(trial, "checked_environment", lambda _: {})
    assert trial.FUZZ.run(False).holds
    assert [path and path.parts[-2:] for path in kept] == [("build", "fuzz")] * len(TARGETS)
    failures["gguf"] = ("KeyError at reader.py:1",)
    outcome = trial.FUZZ.run(False)
    assert not outcome.holds
    assert "gguf: KeyError at reader.py:1" in outcome.measured


def test_a_failure_of_a_kind_is_kept_once_with_its_input(tmp_path: Path) -> None:
    findings = Findings(tmp_path)

    def feed(data: bytes) -> None:
        if data != b"good":
            raise KeyError(data)

    feed_one = guarded(feed, findings)
    for data in (b"good", b"bad", b"worse"):
        feed_one(data)
    assert list(findings.kinds) == ["KeyError at outside"]
    [kept] = tmp_path.glob("*.input")
    assert kept.read_bytes() == b"bad"


def test_changes_of_a_tree_follow_from_the_seed() -> None:
    mutate = mutator(JSON)
    data = b'{"a": [1, 2, {"b": "text"}], "c": 1.5}'
    changed = [mutate(data, 4096, seed) for seed in range(50)]
    assert changed == [mutate(data, 4096, seed) for seed in range(50)]
    assert len(set(changed)) > 30
