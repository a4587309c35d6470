# SPDX-License-Identifier: Apache-2.0
"""Tiers of the tests: which cases run, by what they take, by their parameters, and by what a change touches.

Nothing is marked by hand. A tier's rules are applied to the cases of each test function; what a rule leaves open
is drawn by the hash of the commit, so that every commit tries other cases and every run of a commit the same ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
PINNED = ROOT / "tests" / "pinned.txt"
"""Names of cases that failed in `make test-all`: they run in every tier."""

UNMEASURED = 0.2
"""Seconds that a case counts until it is measured."""
LONGEST_KEY = 160
SEEDS = {"seed", "first"}
"""Names of parameters that number lives of a simulation, if their values are evenly spaced."""
INSTRUCTION_SETS = (
    "reference",
    "neon",
    "neon_dotprod",
    "neon_i8mm",
    "neon_bf16",
    "avx2",
    "avx_vnni",
    "avx512",
    "avx512_vnni",
    "amx_emulated",
    "avx512_bf16",
    "amx",
)
"""Values of parameters that choose kernels, best last."""
ROTATED = {
    "pagoda/plugins/cuda/tests/": (
        "pagoda/plugins/cuda/",
        "pagoda/backend/graph.py",
        "pagoda/backend/operations.py",
    ),
    "tests/fuzz/": ("benchmarks/chaos/fuzz/", "csrc/", "pagoda/checkpoints/", "pagoda/ipc/"),
}
"""Tests of which a tenth runs unless the sources that they are for have changed."""
OF_OTHER_KERNELS = {"tests/backend/": ("csrc/", "CMakeLists.txt")}
"""The same for runs with kernels that were built apart, as `make test-native` does."""
WITHOUT_TORCH = {
    *(
        "admission",
        "api",
        "cli",
        "concurrency",
        "docs",
        "engine",
        "executor",
        "faults",
        "fleet",
        "ipc",
        "kv",
    ),
    *("llm", "messages", "plugins", "sim", "telemetry", "text", "tools", "tests"),
    *(
        "anthropic",
        "batches",
        "disaggregation",
        "disk_tier",
        "kv_events",
        "llamacpp",
        "ollama",
        "page",
        "responses",
        "router",
        "scoring",
        "sglang",
        "trace",
        "vllm",
    ),
}
"""Rooms whose modules do not load torch, and the tests that are in no room."""


def room_of(path: Path) -> str | None:
    """The room of a file or directory of tests, by its path in the repository: a directory of `tests`, or a
    plugin, whose tests are in its own; None for what lies above."""
    match path.parts:
        case "pagoda", "plugins", plugin, "tests", *_:
            return plugin
        case "tests", room, *inner:
            return room if inner or not path.suffix else "tests"
    return None


def folder_of(path: Path) -> str:
    """The name of the directory of a file of tests, or of the plugin whose tests it holds."""
    parent = path.parent
    return parent.parent.name if parent.name == "tests" else parent.name


class Tier(NamedTuple):
    """Rules of a tier."""

    minutes: float
    """Time that its tests may take on two cores."""
    strength: int
    """Of all parameters, each value comes (1), or each pair of values of two (2), or all combinations (0)."""
    families: int
    """Values of the longest parameter that come with all values of the others: the families, as a rule."""
    seeds: int
    """One of so many."""
    instruction_sets: int
    """Besides the reference, the best one first."""
    whole: float
    """Seconds: functions whose cases take less in all run whole."""
    cheap: float
    """Seconds: cases that take no more run wherever the rules above ask for them."""
    share: float
    """Seconds that a function's further cases may take, after the first and beside the cheap ones."""
    dearest: float
    """Seconds: cases that take more do not run, unless the change touches what they test."""


TIERS = {
    "quick": Tier(0.6, 1, 0, 40, 1, 0.05, 0.0, 0.08, 0.15),
    "check": Tier(4.2, 1, 4, 20, 1, 0.1, 0.07, 0.1, 1.5),
    "test": Tier(9, 2, 0, 5, 2, 0.2, 0.055, 0.095, 8.0),
    "all": Tier(60, 0, 0, 1, 99, 1e9, 1e9, 1e9, 1e9),
}
NEXT = {"quick": "check", "check": "test", "test": "all"}
"""The tier whose rules hold for tests of the modules that a change touches."""


class Case(NamedTuple):
    """A case of a test function."""

    name: str
    """Its node id."""
    axes: Mapping[str, tuple[object, ...]]
    """Its place on each axis of the function's parameters; parameters of one table are one axis."""

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    def cost(self, durations: Mapping[str, float]) -> float:
        return durations.get(key(self.name), UNMEASURED)


def key(name: str) -> str:
    """`name` as durations are kept by it: some names hold texts of thousands of characters."""
    if len(name) <= LONGEST_KEY:
        return name
    return f"{name[:LONGEST_KEY]}...{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class Change(NamedTuple):
    """What the tests are run for."""

    commit: str
    """Its hash; empty where there is no repository."""
    files: frozenset[str]
    """Paths that differ from the branch it began on, and from the commit before it on that branch itself."""

    def draw(self, text: str) -> int:
        """A number of 64 bits that is another for every commit."""
        return int.from_bytes(hashlib.sha256(f"{self.commit} {text}".encode()).digest()[:8])

    def touches(self, file: str) -> bool:
        """Whether `file` of tests, or a module that it is named after, has changed."""
        if file.startswith("tests/backend/test_cpu") and self.touches_kernels():
            return True
        room, stem = folder_of(Path(file)), Path(file).stem.removeprefix("test_")
        return file in self.files or any(
            room in Path(path).parts and _is_named_after(stem, Path(path).stem, room)
            for path in self.files
        )

    def rooms(self) -> set[str]:
        """Names of the directories of tests whose code or tests have changed."""
        rooms = {part for path in self.files for part in Path(path).parts[1:-1]}
        return rooms | ({"backend"} if self.touches_kernels() else set())

    def touches_kernels(self) -> bool:
        return any(path.startswith(("csrc/", "CMakeLists.txt")) for path in self.files)

    def needs_sanitizers(self) -> bool:
        """Whether `make test` builds the kernels once more, with sanitizers: it does for changes of theirs, and
        for one commit of ten."""
        return self.touches_kernels() or self.draw("sanitizers") % 10 == 0


def _is_named_after(subject: str, module: str, room: str) -> bool:
    subject = subject.removeprefix(f"{room}_")
    return subject == module or subject.startswith(f"{module}_")


def find_change(root: Path = ROOT) -> Change:
    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(root), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return []
        return done.stdout.split("\n")[:-1] if done.returncode == 0 else []

    (commit,) = git("rev-parse", "HEAD") or [""]
    (base,) = git("merge-base", "HEAD", "main") or git("rev-parse", "HEAD~1") or [""]
    if base == commit:
        (base,) = git("rev-parse", "HEAD~1") or [""]
    files = git("diff", "--name-only", base) if base else []
    return Change(commit, frozenset(files + git("ls-files", "--others", "--exclude-standard")))


def read_durations(path: Path = DURATIONS) -> dict[str, float]:
    """Seconds of each case by its name."""
    files: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text(encoding="utf-8"))
    return {
        f"{file}::{function}{case}": seconds
        for file, functions in files.items()
        for function, cases in functions.items()
        for case, seconds in cases.items()
    }


def write_durations(durations: Mapping[str, float], path: Path = DURATIONS) -> None:
    """Writes seconds to one digit, in which measurements of the same agree."""
    files: dict[str, dict[str, dict[str, float]]] = {}
    for name, seconds in sorted(durations.items()):
        function, bracket, case = name.partition("[")
        file, _, function = function.partition("::")
        cases = files.setdefault(file, {}).setdefault(function, {})
        cases[bracket + case] = max(0.01, float(f"{seconds:.1g}"))
    text = json.dumps(files, indent=0, ensure_ascii=True)
    path.write_text(text + "\n", encoding="utf-8")


def read_pinned(path: Path = PINNED) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("# ")]


def pin(names: Iterable[str], path: Path = PINNED) -> None:
    """Adds `names` to those that run in every tier."""
    added = sorted(set(names) - set(read_pinned(path)))
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{name}\n" for name in added)


def choose(
    cases: Sequence[Case],
    tier: str,
    change: Change,
    durations: Mapping[str, float],
    pinned: Iterable[str] = (),
    rotated: Mapping[str, tuple[str, ...]] = ROTATED,
) -> set[str]:
    """Names of the cases that run in `tier`; cases that nobody has measured always do."""
    functions: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        functions[case.function].append(case)
    chosen = {case.name for case in cases if key(case.name) not in durations} | set(pinned)
    for function, those in functions.items():
        file = function.partition("::")[0]
        rules = TIERS[NEXT.get(tier, tier) if change.touches(file) else tier]
        if tier != "all" and not _sources_changed(file, change, rotated):
            those = [case for case in those if change.draw(case.name) % 10 == 0]
        chosen |= _of_function(those, rules, change, durations)
    return chosen & {case.name for case in cases}


def _sources_changed(file: str, change: Change, rotated: Mapping[str, tuple[str, ...]]) -> bool:
    for room, sources in rotated.items():
        if file.startswith(room):
            return any(path.startswith((room, *sources)) for path in change.files)
    return True


def _of_function(
    cases: list[Case], rules: Tier, change: Change, durations: Mapping[str, float]
) -> set[str]:
    cases = [case for case in cases if case.cost(durations) <= rules.dearest]
    if sum(case.cost(durations) for case in cases) <= rules.whole:
        return {case.name for case in cases}
    for axis, places in _places(cases).items():
        kept = _thinned(axis, places, rules, change)
        cases = [case for case in cases if case.axes[axis] in kept]
    chosen, left = set[str](), rules.share
    for case in _in_order_of_need(cases, rules, change):
        cost = case.cost(durations)
        if cost > rules.cheap:
            left -= cost if chosen else 0
        if cost <= rules.cheap or left >= 0:
            chosen.add(case.name)
    return chosen


Place = tuple[object, ...]


def _places(cases: Iterable[Case]) -> dict[str, list[Place]]:
    """All places of each axis, in the order of the cases."""
    places: dict[str, dict[Place, None]] = defaultdict(dict)
    for case in cases:
        for axis, place in case.axes.items():
            places[axis][place] = None
    return {axis: list(each) for axis, each in places.items()}


def _thinned(axis: str, places: list[Place], rules: Tier, change: Change) -> set[Place]:
    values = [place[0] for place in places]
    if axis in SEEDS and _evenly_spaced(values):
        first = change.draw("seeds") % min(rules.seeds, len(places))
        return set(places[first :: rules.seeds])
    if set(values) <= set(INSTRUCTION_SETS):
        *others, best = sorted((str(it) for it in values), key=INSTRUCTION_SETS.index)
        others = sorted(set(others) - {"reference"}, key=change.draw)
        return {(it,) for it in ("reference", best, *others[: rules.instruction_sets - 1])}
    return set(places)


def _evenly_spaced(values: list[object]) -> bool:
    numbers = [value for value in values if isinstance(value, int)]
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    return len(numbers) == len(values) and len(steps) == 1


def _in_order_of_need(cases: list[Case], rules: Tier, change: Change) -> list[Case]:
    """Cases with each place of all axes, those of whole families, then those with each pair of places."""
    drawn = sorted(cases, key=lambda case: change.draw(case.name))
    if rules.strength == 0:
        return drawn
    chosen = _covering(drawn, [], 1)
    places = _places(drawn)
    if len(places) > 1:
        longest = max(places, key=lambda axis: len(places[axis]))
        whole = sorted(places[longest], key=lambda place: change.draw(str(place)))
        whole = whole[: rules.families]
        chosen += [it for it in drawn if it.axes[longest] in whole and it not in chosen]
    return chosen + _covering(drawn, chosen, rules.strength)


def _covering(drawn: list[Case], chosen: Sequence[Case], strength: int) -> list[Case]:
    """Cases which add to `chosen` all combinations of `strength` places: those with most of them first."""

    def combinations(case: Case) -> set[object]:
        axes = sorted(case.axes.items())
        return set(itertools.combinations(axes, min(strength, len(axes))))

    covered = set[object]().union(*map(combinations, chosen))
    news = [(case, combinations(case) - covered) for case in drawn]
    added: list[Case] = []
    while news := [(case, new) for case, new in news if new]:
        best, gained = max(news, key=lambda pair: len(pair[1]))
        added.append(best)
        news = [(case, new - gained) for case, new in news]
    return added


if __name__ == "__main__":
    print("test-native" if find_change().needs_sanitizers() else "")
