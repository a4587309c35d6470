# SPDX-License-Identifier: Apache-2.0
"""Keeps files short, and tests named after what they test and free of private names and of waiting by the clock.

    python tools/check_files.py [--rooms | --add-license] [FILE OR DIRECTORY ...]

Prints `file:line: what is wrong` and exits with 1 if anything is. `--rooms` prints the counts of each directory
instead, and `--add-license` writes the licence's line into files that lack it. In tests the check refuses private
names of other modules, fixed sleeps (a loop may poll, and time in `VIRTUAL` is virtual), and assertions on how
long something took.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("pagoda", "benchmarks", "csrc", "tests", "tools")
INSTALLED = "node_modules"
"""Directories of packages of others, which `make test-clients` installs."""
SUFFIXES = {".c", ".cpp", ".css", ".h", ".html", ".js", ".py", ".pyi"}

LICENSE = "SPDX-License-Identifier: Apache-2.0"
"""Words of the first line of every source file that is not empty."""
COMMENTS = {".py": "# {}", ".pyi": "# {}", ".css": "/* {} */", ".html": "<!-- {} -->"}
"""Comments by suffix; others are `// ...`."""
FIRST = ("#!", "<!doctype")
"""Beginnings of lines that must stay the first one of a file."""

MAX_LINES = 600
LONGER = {
    "tools/train_tiny/skills.py": "one generator of conversations for each skill, alike in form",
}

CLOCKS = {
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "time",
    "time_ns",
}
VIRTUAL = (
    "tests/sim/",
    "pagoda/plugins/router/tests/test_prefill_decode.py",
    "pagoda/plugins/router/tests/test_changing_roles.py",
)
"""Tests that run on a simulated clock as a whole."""
APART = ("tests/ui/", "tests/clients/")
"""Rooms whose tests are not collected with the others."""
PUBLIC = {"_", "_asdict", "_exit", "_fields", "_native", "_replace"}


class Offence(NamedTuple):
    rule: str
    line: int
    message: str


def check_size(path: Path, name: str) -> Iterator[Offence]:
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n") - has_license(path, text)
    if lines > MAX_LINES and name not in LONGER:
        yield Offence("size", MAX_LINES + 1, f"{lines} lines, {MAX_LINES} allowed: split the file")


def license_line(path: Path) -> str:
    return COMMENTS.get(path.suffix, "// {}").format(LICENSE) + "\n"


def _place_of_license(text: str) -> int:
    """The offset of the first line, or of the second behind one that must be the first."""
    return text.find("\n") + 1 if text.lower().startswith(FIRST) else 0


def has_license(path: Path, text: str) -> bool:
    return text.startswith(license_line(path), _place_of_license(text))


def check_license(path: Path) -> Iterator[Offence]:
    text = path.read_text(encoding="utf-8")
    if text.strip() and not has_license(path, text):
        wanted = license_line(path).strip()
        yield Offence("license", 1, f"`{wanted}` is not the first line: --add-license writes it")


def add_license(path: Path) -> bool:
    """Writes the licence's line into a file that lacks it; returns whether it did."""
    if not any(check_license(path)):
        return False
    text = path.read_text(encoding="utf-8")
    place = _place_of_license(text)
    path.write_text(text[:place] + license_line(path) + text[place:], encoding="utf-8")
    return True


def check_name(path: Path, tree: ast.Module, root: Path = ROOT) -> Iterator[Offence]:
    """Checks that a test file is named after a module of its room, or says in a docstring what it tests."""
    subject = path.stem.removeprefix("test_")
    if re.search(r"_\d+$", subject):
        yield Offence("name", 1, "the name ends with a number: name the file after what it tests")
    room = path.parent.parent.name if path.parent.name == "tests" else path.parent.name
    subjects = {subject, subject.removeprefix(f"{room}_")}
    places = (root / "pagoda" / room, root / "pagoda" / "plugins" / room, root / room)
    found = [file for place in places for file in place.rglob("*")]
    modules = {file.stem for file in found if file.is_dir() or file.suffix == ".py"}
    named = any(
        it == module or it.startswith(f"{module}_") for module in modules for it in subjects
    )
    if not named and ast.get_docstring(tree) is None:
        yield Offence(
            "name", 1, "no module has this name, and no docstring says what the file tests"
        )


def check_private(tree: ast.Module) -> Iterator[Offence]:
    """Checks that nothing reaches for a private name of another module."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _of_self(node)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attr) if (
                _private(attr) and not _of_self(node) and attr not in own
            ):
                yield Offence("private", node.lineno, f"`{ast.unparse(node)}` is a private name")
            case ast.ImportFrom(names=names):
                for alias in names:
                    if _private(alias.name):
                        yield Offence("private", node.lineno, f"`{alias.name}` is a private name")


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def check_sleeps(tree: ast.Module) -> Iterator[Offence]:
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.While) or _is_virtual(node))
    polls = {id(inner) for loop in loops for inner in ast.walk(loop)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="sleep") | ast.Name(id="sleep"), args=[seconds, *_]
            ) if not _is_zero(seconds) and id(node) not in polls:
                amount = ast.unparse(seconds)
                yield Offence(
                    "sleep", node.lineno, f"sleeps for {amount} s: wait for what must happen"
                )


def _is_zero(amount: ast.expr) -> bool:
    return isinstance(amount, ast.Constant) and not amount.value


def _is_virtual(node: ast.AST) -> bool:
    """Returns True for a test in virtual time, where sleeping takes none."""
    return isinstance(node, ast.AsyncFunctionDef) and "virtual" in map(
        ast.unparse, node.decorator_list
    )


def check_elapsed(tree: ast.Module) -> Iterator[Offence]:
    """Checks that no assertion compares the difference of two readings of a clock with a number or a constant."""
    readings: set[str] = set()
    elapsed: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if _is_elapsed(value, readings, elapsed):
                    elapsed.add(name)
                elif _reads_clock(value, readings):
                    readings.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and _is_elapsed(node.test, readings, elapsed):
            comparisons = (inner for inner in ast.walk(node.test) if isinstance(inner, ast.Compare))
            if any(
                _is_limit(side) for each in comparisons for side in (each.left, *each.comparators)
            ):
                yield Offence("elapsed", node.lineno, "asserts how long something took")


def _is_limit(side: ast.expr) -> bool:
    match side:
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return name.isupper()
    return False


def _is_elapsed(expression: ast.expr, readings: set[str], elapsed: set[str]) -> bool:
    for node in ast.walk(expression):
        match node:
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                if _reads_clock(left, readings) and _reads_clock(right, readings):
                    return True
            case ast.Name(id=name) if name in elapsed:
                return True
    return False


def _reads_clock(expression: ast.expr, readings: set[str]) -> bool:
    for node in ast.walk(expression):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=attr)) if (
                attr in CLOCKS
            ):
                return True
            case ast.Name(id=name) if name in readings:
                return True
    return False


def check_file(path: Path) -> Iterator[Offence]:
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
    yield from check_size(path, name)
    yield from check_license(path)
    if path.suffix != ".py" or "tests" not in name.split("/")[:-1]:
        return
    tree = ast.parse(path.read_text(encoding="utf-8"), name)
    yield from check_private(tree)
    if path.stem.startswith("test_"):
        yield from check_name(path, tree)
        yield from check_elapsed(tree)
        if not name.startswith(VIRTUAL):
            yield from check_sleeps(tree)


def check_unique(names: Sequence[str]) -> Iterator[tuple[str, Offence]]:
    """Checks that no two test files that are collected together have one name, which pytest refuses."""
    first: dict[str, str] = {}
    for name in names:
        stem = name.rpartition("/")[2]
        if "tests/" not in name or name.startswith(APART) or not stem.startswith("test_"):
            continue
        if first.setdefault(stem, name) != name:
            yield name, Offence("name", 1, f"{first[stem]} has the same name: pytest takes one")


def files_below(paths: Sequence[Path]) -> list[Path]:
    found = [
        file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
    ]
    return [
        file
        for file in found
        if file.suffix in SUFFIXES and file.is_file() and INSTALLED not in file.parts
    ]


def main(arguments: Sequence[str]) -> int:
    by_room = "--rooms" in arguments
    names = [argument for argument in arguments if not argument.startswith("--")]
    paths = [Path(name).resolve() for name in names] or [ROOT / name for name in CHECKED]
    if "--add-license" in arguments:
        added = sum(map(add_license, files_below(paths)))
        print(f"{added} files have got the line of the licence")
        return 0
    rooms: defaultdict[Path, Counter[str]] = defaultdict(Counter)
    for file in files_below(paths):
        for offence in sorted(check_file(file), key=lambda offence: offence.line):
            rooms[file.parent][offence.rule] += 1
            if not by_room:
                print(f"{file}:{offence.line}: {offence.message}")
    whole = [file.relative_to(ROOT).as_posix() for file in files_below([ROOT / "tests"])]
    for name, offence in check_unique(whole):
        rooms[(ROOT / name).parent][offence.rule] += 1
        if not by_room:
            print(f"{name}:{offence.line}: {offence.message}")
    if by_room:
        for room, counts in sorted(rooms.items()):
            print(
                f"{room}: {', '.join(f'{rule} {count}' for rule, count in sorted(counts.items()))}"
            )
    return 1 if rooms else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
