# SPDX-License-Identifier: Apache-2.0
"""Rules of tiers: what they keep of the cases of a function, and that each tier fits its time."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from case_tiers import (
    INSTRUCTION_SETS,
    TIERS,
    WITHOUT_TORCH,
    Case,
    Change,
    choose,
    find_change,
    key,
    pin,
    read_durations,
    read_pinned,
    room_of,
    write_durations,
)
from tier_hooks import CASES

COMMITS = [Change(str(number), frozenset()) for number in range(5)]
FAMILIES = [f"family{number}" for number in range(20)]
APART = {"ui", "real", "clients", "peers"}
"""Rooms that the suite does not collect, or that have no tests."""
WAYS = ["batched", "chunked", "cached", "preempted"]


def product(function: str = "tests/kv/test_x.py::test_f", **axes: list[object]) -> list[Case]:
    return [
        Case(
            f"{function}[{'-'.join(map(str, places))}]",
            {name: (place,) for name, place in zip(axes, places, strict=True)},
        )
        for places in itertools.product(*axes.values())
    ]


def chosen(
    cases: list[Case], tier: str, change: Change = COMMITS[0], seconds: float = 1.0
) -> list[Case]:
    durations = {key(case.name): seconds for case in cases}
    names = choose(cases, tier, change, durations)
    return [case for case in cases if case.name in names]


def test_a_family_comes_one_way_in_check_and_four_come_in_all() -> None:
    cases = product(family=FAMILIES, way=WAYS)
    for change in COMMITS:
        ways = [
            sum(case.axes["family"] == (family,) for case in chosen(cases, "check", change, 0.05))
            for family in FAMILIES
        ]
        assert min(ways) >= 1
        assert ways.count(len(WAYS)) >= 4
        assert sum(ways) <= 20 + 4 * 4
    drawn = {tuple(case.name for case in chosen(cases, "check", it, 0.05)) for it in COMMITS}
    assert len(drawn) == len(COMMITS), "every commit tries others"


def test_pairs_of_family_way_and_backend_come_in_test() -> None:
    cases = product(family=FAMILIES, way=WAYS, backend=["reference", "cpu"])
    found = chosen(cases, "test", seconds=0.05)
    for one, other in itertools.combinations(("family", "way", "backend"), 2):
        pairs = {(case.axes[one], case.axes[other]) for case in cases}
        assert {(case.axes[one], case.axes[other]) for case in found} == pairs
    assert len(found) < 0.7 * len(cases)
    assert chosen(cases, "all", seconds=0.1) == cases


def test_seeds_are_one_in_so_many_from_a_place_of_the_commit() -> None:
    cases = product(seed=[*range(0, 5000, 50)])
    for tier, every in (("check", 20), ("test", 5), ("all", 1)):
        places = [cases.index(case) for case in chosen(cases, tier, seconds=0.05)]
        assert places == list(range(places[0], 100, every))
    assert len({chosen(cases, "check", change, 0.05)[0].name for change in COMMITS}) > 1
    assert len(chosen(product(first=[*range(0, 9)]), "check")) == 1
    broke_once = product(seed=[31965, 36852, 67743])
    assert chosen(broke_once, "test", seconds=0.06) == broke_once, "these are no numbering"


def test_kernels_are_the_reference_and_the_best_ones() -> None:
    cases = product(ops=[*INSTRUCTION_SETS[:4]], number=[*range(10)])
    in_check = {case.axes["ops"][0] for case in chosen(cases, "check", seconds=0.1)}
    assert in_check == {"reference", INSTRUCTION_SETS[3]}
    in_test = {case.axes["ops"][0] for case in chosen(cases, "test", seconds=0.05)}
    assert len(in_test) == 3
    assert in_test >= in_check


def test_rows_of_a_table_and_cheap_functions_run_whole() -> None:
    table = [Case(f"tests/kv/test_x.py::f[{i}]", {"a,b": (i % 2, i // 2)}) for i in range(6)]
    assert chosen(table, "check", seconds=0.01) == table
    cheap = product(family=FAMILIES, way=WAYS)
    assert chosen(cheap, "check", seconds=0.0001) == cheap


def test_cases_that_are_new_or_pinned_run_in_every_tier() -> None:
    cases = product(family=FAMILIES, way=WAYS)
    old = {key(case.name): 1000.0 for case in cases[:-1]}
    for tier in TIERS:
        names = choose(cases, tier, COMMITS[0], old, [cases[0].name, "not collected"])
        kept = {case.name for case in cases} if tier == "all" else {cases[0].name, cases[-1].name}
        assert names == kept


def test_what_is_dear_runs_where_a_change_touches_it() -> None:
    dear = [Case("tests/kv/test_manager.py::test_long", {})]
    assert chosen(dear, "check", seconds=8) == []
    touched = Change("c", frozenset({"pagoda/kv/manager.py"}))
    assert chosen(dear, "check", touched, 8) == dear
    assert touched.touches("tests/kv/test_manager.py")
    assert touched.touches("tests/kv/test_kv_manager_more.py")
    assert not touched.touches("tests/engine/test_manager.py")
    assert touched.rooms() == {"kv"}
    kernels = Change("c", frozenset({"csrc/sampler.cpp"}))
    assert kernels.touches("tests/backend/test_cpu_attention.py")
    assert kernels.rooms() == {"backend"}


def test_kernels_are_built_with_sanitizers_for_changes_of_theirs_and_a_tenth_of_all() -> None:
    due = [Change(str(i), frozenset()).needs_sanitizers() for i in range(400)]
    assert 20 < sum(due) < 60
    for path in ("csrc/impl/rows.cpp", "CMakeLists.txt"):
        assert all(Change(str(i), frozenset({path})).needs_sanitizers() for i in range(20))


def test_a_tenth_of_the_interpreters_cases_run_until_their_sources_change() -> None:
    cases = product("pagoda/plugins/cuda/tests/test_x.py::test_f", number=[*range(200)])
    runs = [{case.name for case in chosen(cases, "test", it, 0.001)} for it in COMMITS]
    assert all(5 < len(run) < 40 for run in runs)
    assert len(set.union(*runs)) > 60
    touched = Change("0", frozenset({"pagoda/plugins/cuda/kernels/rows.py"}))
    assert chosen(cases, "test", touched, 0.001) == cases


def test_durations_and_pins_are_kept(tmp_path: Path) -> None:
    took = {"tests/a.py::f[x[1]]": 0.123, "tests/a.py::f[y]": 0.0001, "tests/b.py::C::g": 12.3}
    write_durations(took, tmp_path / "d.json")
    assert read_durations(tmp_path / "d.json") == {
        "tests/a.py::f[x[1]]": 0.1,
        "tests/a.py::f[y]": 0.01,
        "tests/b.py::C::g": 10,
    }
    (tmp_path / "p.txt").write_text("# Why\nb\n")
    pin(["c", "b"], tmp_path / "p.txt")
    assert read_pinned(tmp_path / "p.txt") == ["b", "c"]
    assert len(key("x" * 5000)) < 200
    assert key("x" * 5000) != key("x" * 5001)


def test_a_change_is_what_differs_from_the_branch_it_began_on(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@x"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert find_change(tmp_path) == Change("", frozenset())
    git("init", "-q", "-b", "main")
    for name in ("one", "two"):
        (tmp_path / name).write_text("")
        git("add", name)
        git("commit", "-q", "-m", name)
    assert find_change(tmp_path) == Change(git("rev-parse", "HEAD"), frozenset({"two"}))
    git("checkout", "-q", "-b", "branch")
    (tmp_path / "three").write_text("")
    git("add", "three")
    git("commit", "-q", "-m", "three")
    (tmp_path / "one").write_text("changed")
    (tmp_path / "four").write_text("")
    assert find_change(tmp_path).files == {"one", "three", "four"}


@pytest.mark.parametrize("tier", ["quick", "check", "test"])
def test_the_tier_fits_its_time(tier: str, request: pytest.FixtureRequest) -> None:
    """Cases that nobody has measured yet do not count. Mends: cheaper cases, or stricter rules of the tier."""
    cases = request.config.stash[CASES]
    here = Path(__file__).parent
    ours = {path.relative_to(here).parts[0] for path in here.rglob("test_*.py")}
    collected = {case.name.split("/")[1].split("::")[0] for case in cases}
    if not {room for room in ours if (here / room).is_dir()} - APART <= collected:
        pytest.skip("needs the cases of all rooms")
    durations = read_durations()
    cases = [case for case in cases if key(case.name) in durations]
    if tier == "quick":
        cases = [
            case for case in cases if room_of(Path(case.name.partition("::")[0])) in WITHOUT_TORCH
        ]
    names = choose(cases, tier, Change("", frozenset()), durations)
    seconds = sum(case.cost(durations) for case in cases if case.name in names)
    assert seconds <= 2 * 60 * TIERS[tier].minutes
