# SPDX-License-Identifier: Apache-2.0
"""Tests of hosts that start and stop during a simulation, as planners and timetables say."""

from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.plugins.plan.journal import replay
from pagoda.plugins.simulate.records import Slo
from pagoda.plugins.simulate.report import make_report
from pagoda.plugins.simulate.simulation import Outcome, simulate
from pagoda.plugins.simulate.topology import Topology, read_topology
from pagoda.plugins.simulate.workload import read_workload

FLEET = (
    "model: llama-3.1-8b\nroot: world\nrouters:\n"
    "  world: {policy: least-pending-tokens, children: {pool: 2}}\n"
    "  pool: {children: {h: 6}}\nhosts: {h: {device: l40s, block_size: 512, start_s: 15}}\n"
)
PLANNED = "scaling: [{what: pool, slo: {ttft_s: 6, tpot_s: 0.4, share: 0.9}, hold_s: 30, interval_s: 15}]\n"
BURST = (
    "duration_s: 240\nrate: 0.3\nprompt_tokens: {mean: 15000, sigma: 0.3}\noutput_tokens: {mean: 20}\n"
    "bursts: [{at_s: 60, for_s: 60, factor: 10}]\n"
)


def _topology(folder: Path, text: str) -> Topology:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return read_topology(path)


def _run(folder: Path, text: str, **options) -> Outcome:
    path = folder / "sessions.yaml"
    path.write_text(BURST)
    workload = read_workload(path, 0, scale=1, num_requests=None)
    outcome = simulate(_topology(folder, text), workload, 0, **options)
    assert [it.error for it in outcome.records.requests if it.error] == []
    assert all(it.ended is not None for it in outcome.records.requests)
    return outcome


def _num_up(outcome: Outcome) -> dict[float, int]:
    return {it.at: it.num_up for it in outcome.records.samples["h"]}


def test_planned_hosts_follow_the_load_and_decisions_are_replayed(tmp_path: Path) -> None:
    journal = tmp_path / "plan.jsonl"
    outcome = _run(tmp_path, FLEET + PLANNED, journal=journal)
    num_up = _num_up(outcome)
    most = max(num_up.values())
    assert num_up[0] == 2
    assert most > 4
    assert num_up[max(num_up)] < most
    assert outcome.host_s["h"] < 0.7 * most * outcome.records.ended_at
    decisions = [it for it in replay(journal) if it.plan]
    assert len(decisions) > 10
    assert all(it.is_same for it in decisions)
    report = make_report(_topology(tmp_path, FLEET + PLANNED), outcome, Slo(), {})
    hours = outcome.host_s["h"] / 3600
    assert report["host_hours"] == pytest.approx(hours, abs=1e-6)
    ended_at = outcome.records.ended_at / 3600
    assert report["price_per_hour"] == pytest.approx(hours * 1.0 / ended_at, abs=1e-4)
    first = journal.read_bytes()
    journal.unlink()
    _run(tmp_path, FLEET + PLANNED, journal=journal)
    assert journal.read_bytes() == first


def test_a_timetable_sets_the_number_of_hosts(tmp_path: Path) -> None:
    table = (
        "{at_s: 0, hosts: 2}, {at_s: 60, hosts: 5}, {at_s: 150, hosts: 3}, {at_s: 155, hosts: 4}"
    )
    num_up = _num_up(_run(tmp_path, f"{FLEET}scaling: [{{what: pool, timetable: [{table}]}}]\n"))
    assert num_up[0] == num_up[72] == 4
    assert num_up[80] == 10
    assert num_up[220] == 8


def test_roles_are_planned_apart(tmp_path: Path) -> None:
    text = FLEET.replace("{h: 6}", "{p: 4, d: 4}")
    kind = "{device: l40s, block_size: 512, start_s: 15, role: "
    text = text[: text.index("hosts:")] + f"hosts: {{p: {kind}prefill}}, d: {kind}decode}}}}\n"
    outcome = _run(tmp_path, text + PLANNED)
    most = {
        kind: max(it.num_up for it in samples) for kind, samples in outcome.records.samples.items()
    }
    assert most["p"] > 2
    assert most["d"] == 2  # one of each pool has little to do


def test_faults_and_scaling_lose_no_request(tmp_path: Path) -> None:
    faults = "faults: [{what: h, every_s: 150, for_s: 20}, {what: pool, kind: router, at_s: 90}]\n"
    outcome = _run(tmp_path, FLEET + PLANNED + faults)
    assert outcome.records.num_hosts_lost > 5


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("{what: h}", "scaling.0.what: h is none of routers"),
        ("{what: world}", "world has other routers behind it"),
        ("{what: pool}, {what: pool}", "pool has a rule of scaling already"),
        ("{what: pool, least: 7}", "pool has fewer than 7 hosts behind it"),
        ("{what: pool, interval_s: 0}", "interval_s: Expected `float` >= 1"),
        (
            "{what: pool, timetable: [{at_s: 9, hosts: 1}, {at_s: 1, hosts: 1}]}",
            "from the earliest",
        ),
        (
            "{what: pool, hold_s: 9, timetable: [{at_s: 1, hosts: 1}]}",
            "hold_s is for a planner; leave it out beside a timetable",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, rule: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.yaml, line 7") as caught:
        _topology(tmp_path, f"{FLEET}scaling: [{rule}]\n")
    assert words in str(caught.value)


def test_a_journal_is_of_one_planner(tmp_path: Path) -> None:
    workload = tmp_path / "sessions.yaml"
    workload.write_text(BURST)
    requests = read_workload(workload, 0, scale=1, num_requests=None)
    with pytest.raises(ConfigError, match="--journal is of one planner"):
        simulate(_topology(tmp_path, FLEET), requests, 0, journal=tmp_path / "plan.jsonl")
