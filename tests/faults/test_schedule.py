# SPDX-License-Identifier: Apache-2.0
"""Schedules of faults, as a person writes them."""

from __future__ import annotations

from itertools import islice

import pytest

from pagoda.errors import ConfigError
from pagoda.faults.injector import plan_of
from pagoda.faults.schedule import POINTS, FaultEntry, parse_schedule


def entry(word: str) -> FaultEntry:
    (only,) = parse_schedule(word).entries
    return only


def passes(word: str, count: int = 12, seed: str = "") -> list[int]:
    """The passes at which the fault comes, from 1 on."""
    return [at for at, comes in enumerate(islice(entry(word).times(seed), count), 1) if comes]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("worker.step:kill@5,12", [5, 12]),
        ("worker.step:kill@10+", [10, 11, 12]),
        ("engine.result:double@*3", [3, 6, 9, 12]),
        ("disk.write:enospc", list(range(1, 13))),
        ("disk.write:enospc%0", []),
        ("disk.write:enospc%1", list(range(1, 13))),
    ],
)
def test_passes(word: str, expected: list[int]) -> None:
    assert passes(word) == expected


def test_rates_are_drawn_from_the_seed() -> None:
    word = "disk.write:enospc%0.1"
    found = passes(word, 2000, "7 1 disk.write")
    assert found == passes(word, 2000, "7 1 disk.write") != passes(word, 2000, "8 1 disk.write")
    assert 150 < len(found) < 250


def test_parts_of_an_entry() -> None:
    found = entry("worker[2].logits:slow=0.5~poison@3")
    assert (found.point, found.action, found.value) == ("worker.logits", "slow", 0.5)
    assert (found.instance, found.text, found.passes) == (2, "poison", {3})
    assert found.concerns(["req-poison-0"])
    assert not found.concerns(["req-1"])
    both = parse_schedule("seed=7 worker.step:kill@5 disk.write:enospc%0.1")
    assert (both.seed, len(both.entries)) == (7, 2)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("seed=7", "must name a fault, such as worker.step:kill@5"),
        ("seed=x worker.step:kill", "seed must be a whole number"),
        ("worker.step", "must be POINT:ACTION"),
        ("worker.step:kill@", "must be POINT:ACTION"),
        ("worker.step:kill@5@6", "must be POINT:ACTION"),
        ("worker.walk:kill", "must be one of frontend.send, "),
        ("worker.step:enospc", "the action at worker.step must be one of crash, hang, kill, "),
        ("worker.step:kill@0", "must count from 1"),
        ("worker[0].step:kill", "must count from 1"),
        ("worker.step:kill@*0", "must count from 1"),
        ("worker.step:kill%1.5", "must be from 0 to 1"),
        ("engine.turn:kill~r1", "must be at worker.step or worker.logits"),
        ("worker.step:slow=1.2.3", "has a number that cannot be read"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_schedule(line)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("PAGODA_FAULTS")


def test_faults_need_testing() -> None:
    line = "worker.step:kill@5"
    assert plan_of({}) is None
    with pytest.raises(ConfigError, match="set PAGODA_TESTING=1"):
        plan_of({"PAGODA_FAULTS": line})
    with pytest.raises(ConfigError, match=r"worker\.walk"):
        plan_of({"PAGODA_FAULTS": "worker.walk:kill", "PAGODA_TESTING": "1"})
    plan = plan_of({"PAGODA_FAULTS": line, "PAGODA_TESTING": "1"})
    assert plan is not None
    assert plan.schedule == line


def test_every_point_takes_some_action() -> None:
    for point, actions in POINTS.items():
        for action in actions:
            assert entry(f"{point}:{action}").point == point
