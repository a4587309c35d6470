# SPDX-License-Identifier: Apache-2.0
"""Tests of the command line, from files to files."""

import json
from pathlib import Path

import pytest

from pagoda.cli.main import main

FLEET = "model: llama-3.1-8b\nroot: pool\nrouters: {pool: {children: {h: 1}}}\nhosts: {h: {device: l40s}}\n"
SESSIONS = "duration_s: 10\nrate: 6\noutput_tokens: {mean: 60}\n"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text(FLEET)
    Path("sessions.yaml").write_text(SESSIONS)


def test_a_report_is_written_as_json_and_html(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "fleet.yaml", "--workload", "sessions.yaml", "--slo", "ttft:500,tpot:60"]
    assert main([*words, "--output", "a.json", "--html", "a.html"]) == 0
    shown = capsys.readouterr().out
    assert "0 lost" in shown
    assert "h: roofline: not measured" in shown
    report = json.loads(Path("a.json").read_text())
    assert report["all"]["completed"] == report["all"]["requests"] > 30
    html = Path("a.html").read_text()
    assert "<svg" in html
    assert "http" not in html
    assert main([*words, "--output", "b.json"]) == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


def test_the_cheapest_fleet_keeps_the_slo(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "recommend", "fleet.yaml", "--workload", "sessions.yaml", "--no-splits"]
    words += ["--policies", "least-pending-tokens", "--slo", "ttft:400,tpot:60", "--scale", "4"]
    assert main([*words, "--output", "tried.json"]) == 0
    assert "least-pending-tokens" in capsys.readouterr().out
    tried = json.loads(Path("tried.json").read_text())["tried"]
    goodput = {it["hosts"]: it["report"]["all"]["goodput"] for it in tried}
    cut = {it["hosts"] for it in tried if it["report"]["is_given_up"]}
    least = min(hosts for hosts, share in goodput.items() if share >= 0.99 and hosts not in cut)
    assert goodput.get(least - 1, 0.0) < 0.99
    assert 1 in cut  # overload was not simulated to its end


def test_policies_are_compared_by_level(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "compare", "fleet.yaml", "--workload", "sessions.yaml"]
    assert main([*words, "--policies", "round-robin", "pool=session-affinity"]) == 0
    assert "fleet: pool=session-affinity" in capsys.readouterr().out
    assert main([*words, "--policies", "round-robin", "moon=round-robin"]) == 2
    assert "no router of fleet is of the level moon; there are pool" in capsys.readouterr().err
    assert main(words) == 2


def test_a_request_is_explained_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fleet.yaml", "--workload", "sessions.yaml"]
    assert main(["simulate", "explain", "s3.t0", *words]) == 0
    assert "it reaches pool/h" in capsys.readouterr().out
    assert main(["simulate", "explain", "s9999.t0", *words]) == 2


def test_step_times_are_fitted_and_used(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"num_tokens": n, "num_seqs": n, "context_tokens": n * c, "time_s": 0.01 + n * 1e-4}
        for n in (1, 2, 8, 32)
        for c in (16, 512)
    ]
    Path("steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["simulate", "fit", "steps.jsonl", "--output", "steps.json"]) == 0
    assert "±0.0% median" in capsys.readouterr().out
    Path("fleet.yaml").write_text(
        "root: pool\nrouters: {pool: {children: {h: 1}}}\nhosts: {h: {steps: steps.json}}\n"
    )
    assert main(["simulate", "fleet.yaml", "--workload", "sessions.yaml"]) == 0
    assert "h: steps.jsonl: ±0.0% median" in capsys.readouterr().out


def test_what_cannot_be_done_is_told_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "fleet.yaml", "--workload", "sessions.yaml"]
    assert main([*words, "--html", "."]) == 2
    assert capsys.readouterr().err == "pagoda: --html: cannot write .: Is a directory.\n"
    assert main([*words, "--requests", "2"]) == 2
    assert "--requests is for traces" in capsys.readouterr().err
