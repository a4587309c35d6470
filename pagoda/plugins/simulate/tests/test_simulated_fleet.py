# SPDX-License-Identifier: Apache-2.0
"""Tests of whole simulations: topology, workload, fleet, clients, faults and leaps together."""

from pathlib import Path

import msgspec
import pytest

from pagoda.engine.core import EngineCore
from pagoda.plugins.simulate.html import page
from pagoda.plugins.simulate.records import RequestRecord, Slo
from pagoda.plugins.simulate.report import make_report
from pagoda.plugins.simulate.simulation import Outcome, simulate
from pagoda.plugins.simulate.topology import Topology, read_topology
from pagoda.plugins.simulate.workload import read_workload

HEAD = "model: llama-3.1-8b\nroot: world\n"
HOSTS = "hosts: {h: {device: h100, block_size: 16, num_blocks: 2000, max_num_seqs: 16}}\n"
ONE = f"{HEAD}routers: {{world: {{children: {{h: 1}}}}}}\n{HOSTS}"
LEVELS = (
    f"{HEAD}routers:\n  world: {{policy: least-pending-tokens, children: {{eu: 2}}}}\n"
    f"  eu: {{level: region, round_trip_ms: 20, children: {{h: 3}}}}\n{HOSTS}"
)
SESSIONS = (
    "duration_s: 30\nrate: 3\nturns: {mean: 2}\npause_s: {mean: 2, sigma: 0.5}\n"
    "prefixes: [{count: 4, tokens: 256}]\noutput_tokens: {mean: 40, sigma: 0.6}\n"
)


class Place:
    """Files of a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def topology(self, text: str) -> Topology:
        path = self._folder / "fleet.yaml"
        path.write_text(text)
        return read_topology(path)

    def run(self, text: str, *, sessions: str = SESSIONS, seed: int = 0, **options) -> Outcome:
        path = self._folder / "sessions.yaml"
        path.write_text(sessions)
        workload = read_workload(path, seed, scale=1, num_requests=None)
        return simulate(self.topology(text), workload, seed, **options)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def _all_answered(outcome: Outcome) -> None:
    requests = outcome.records.requests
    assert len(requests) > 90
    assert [it.error for it in requests if it.error] == []
    assert all(it.ended is not None for it in requests)


def test_the_same_seed_gives_the_same_bytes(place: Place) -> None:
    text = f"{LEVELS}faults: [{{what: h, every_s: 60, for_s: 5}}]\n"

    def report(seed: int) -> tuple[bytes, str]:
        made = make_report(place.topology(text), place.run(text, seed=seed), Slo(0.5), {})
        return msgspec.json.encode(made), page([made])

    assert report(3) == report(3)
    assert report(3) != report(4)


def _times(outcome: Outcome) -> dict[str, RequestRecord]:
    return {it.name: it for it in outcome.records.requests}


def test_leaps_change_times_by_little(place: Place) -> None:
    """Requests that come together may share a step or not, which a microsecond decides: so not of each one."""
    fast = SESSIONS.replace("rate: 3", "rate: 10").replace("turns: {mean: 2}", "turns: {mean: 1}")
    roomy = ONE.replace("max_num_seqs: 16", "max_num_seqs: 64")
    stepped = place.run(roomy, sessions=fast, leap=1)
    leaped = place.run(roomy, sessions=fast, leap=64)
    _all_answered(stepped)
    _all_answered(leaped)
    there, here = _times(stepped), _times(leaped)
    assert max(it.num_refusals for it in here.values()) == 0
    lengths = [{it.name: it.num_output_tokens for it in run.values()} for run in (there, here)]
    assert lengths[0] == lengths[1]
    first = sorted(abs(here[name].ttft - it.ttft) for name, it in there.items())
    last = sorted(abs(here[name].ended - it.ended) for name, it in there.items())
    assert first[len(first) * 9 // 10] < 0.02
    assert last[len(last) * 9 // 10] < 0.03
    assert sum(it.ttft for it in here.values()) == pytest.approx(
        sum(it.ttft for it in there.values()), rel=0.03
    )
    steps = [run.records.itl.percentile(0.5) for run in (stepped, leaped)]
    assert steps[0] == pytest.approx(steps[1], rel=0.03)


def test_prompts_that_begin_alike_are_found_cached(place: Place) -> None:
    outcome = place.run(ONE)
    _all_answered(outcome)
    second = [it for it in outcome.records.requests if it.name.endswith(".t1")]
    assert all(it.num_cached_tokens >= 256 for it in second)
    assert sum(it.num_cached_tokens for it in second) > 256 * 1.3 * len(second)


@pytest.mark.parametrize(
    "fault",
    [
        "{what: h, every_s: 40, for_s: 5}",
        "{what: eu, kind: cut, at_s: 8, for_s: 12}",
        "{what: eu, kind: router, at_s: 8, for_s: 12}",
        "{what: eu, at_s: 8, for_s: 12}",
        "{what: eu, at_s: 8, for_s: 0.5, count: 2}",  # routers are back before their hosts
        "{what: h, at_s: 8, group: 3, for_s: 10}",
    ],
)
def test_faults_lose_no_request(place: Place, fault: str) -> None:
    outcome = place.run(f"{LEVELS}faults: [{fault}]\n")
    assert outcome.records.num_faults > 0
    assert outcome.records.num_moves > 0
    _all_answered(outcome)


def test_prompts_are_computed_by_prefill_hosts(place: Place) -> None:
    text = (
        f"{HEAD}routers: {{world: {{level: pod, children: {{p: 1, d: 2}}}}}}\n"
        "hosts:\n  p: {device: h100, role: prefill}\n  d: {device: h100, role: decode}\n"
    )
    longer = SESSIONS + "prompt_tokens: {mean: 2000}\n"
    outcome = place.run(text, sessions=longer)
    _all_answered(outcome)
    computed = outcome.records.samples["p"][-1].num_prompt_tokens
    assert computed > 0.5 * sum(it.num_prompt_tokens for it in outcome.records.requests) / 2


def test_one_request_is_explained(place: Place) -> None:
    name = place.run(LEVELS).records.requests[50].name
    events = place.run(LEVELS, watched=name).events
    texts = [text for _, text in events]
    assert texts[0].startswith("it arrives with ")
    assert any("world chooses the first of eu." in text for text in texts)
    assert any("it reaches world/eu." in text for text in texts)
    assert texts[-1].startswith("the last of ")


def test_what_is_too_long_is_not_sent(place: Place) -> None:
    outcome = place.run(ONE, sessions="duration_s: 4\nrate: 1\nprompt_tokens: {mean: 40000}\n")
    assert all(it.is_too_long for it in outcome.records.requests)


def test_a_failure_of_an_engine_ends_the_simulation(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests would be waited for without end."""

    def fail(_: EngineCore) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(EngineCore, "drain_refusals", fail)
    with pytest.raises(ZeroDivisionError):
        place.run(ONE)


STEPS = {
    "source": "made up",
    "base_s": 0.01,
    "per_token_s": 1e-5,
    "engine": {"per_step_s": 2e-3, "per_sequence_s": 1e-4, "per_request_s": 1e-3},
    "frontend": {"per_step_s": 1e-3, "per_sequence_s": 1e-4, "per_request_s": 1e-3},
    "spread": [0.9, 0.95, 1.0, 1.3],
    "num_blocks": 2000,
}


@pytest.mark.parametrize("role", ["none", "both"])
def test_replicas_of_one_server_share_its_cores(place: Place, tmp_path: Path, role: str) -> None:
    (tmp_path / "steps.json").write_bytes(msgspec.json.encode(STEPS))

    def figures(cores: int, seed: int = 1) -> dict[str, float]:
        outcome = place.run(
            f"root: s\nrouters: {{s: {{cores: {cores}, children: {{r: 4}}}}}}\n"
            f"hosts: {{r: {{steps: steps.json, max_num_seqs: 16, role: {role}}}}}\n",
            sessions="duration_s: 10\nrate: 40\noutput_tokens: {mean: 40}\n",
            seed=seed,
        )
        _all_answered(outcome)
        return {it.name: (it.ended or 0.0) - it.arrived for it in outcome.records.requests}

    crowded, roomy = figures(2), figures(16)
    assert crowded == figures(2)
    assert crowded != figures(2, seed=2)
    # Of the 4 × 14 ms that all take of the cores for a step of each, 2 cores do 28 at once.
    assert sum(crowded.values()) > 2 * sum(roomy.values())
