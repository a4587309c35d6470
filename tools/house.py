# SPDX-License-Identifier: Apache-2.0
"""Rooms of the house: what each folder of `pagoda/` holds, whom it imports, and how many lines it may have.

    python -m tools.house [--check]

Prints a line for each room of the core and for each plugin, and the size of what a reader of `docs/tour.md` opens.
`--check` prints rooms that have more lines than `tools/house.toml` allows, and exits with 1 if there are any. A
change that needs more lines raises the budget, and its commit says why.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).with_suffix(".toml")
TOUR = ROOT / "docs" / "tour.md"
PLUGINS = "plugins"
GROUND = "(files)"
"""Name of the room of modules that lie beside the folders."""


class Room(NamedTuple):
    """A folder of the core, or a plugin."""

    name: str
    num_lines: int
    """Lines of Python, all of them."""
    num_files: int
    imports: tuple[str, ...]
    """Other rooms whose modules it imports, for types alone, too."""

    @property
    def is_plugin(self) -> bool:
        return self.name.startswith(f"{PLUGINS}/")


def room_of(path: Path) -> str:
    """The room of a file, whose path is relative to `pagoda/`."""
    first, *others = path.parts
    if not others:
        return GROUND
    if first == PLUGINS and len(others) > 1:
        return f"{first}/{others[0]}"
    return first


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                yield f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def _room_of_module(name: str, root: Path) -> str | None:
    """The room of a module of Pagoda, or of what a module has."""
    first, *parts = name.split(".")
    if first != "pagoda" or not parts:
        return None
    if not (root / parts[0]).is_dir():
        return GROUND
    return room_of(Path(*parts[:2], "x")) if parts[0] == PLUGINS else parts[0]


def read_rooms(root: Path = ROOT / "pagoda") -> list[Room]:
    """All rooms, those of the core first, each by name; tests of plugins are not counted."""
    lines: dict[str, list[int]] = {}
    imports: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        if "tests" in path.parts[len(root.parts) :] or path.name == "conftest.py":
            continue
        room = room_of(path.relative_to(root))
        text = path.read_text(encoding="utf-8")
        lines.setdefault(room, []).append(text.count("\n"))
        found = (_room_of_module(name, root) for name in _imported(ast.parse(text)))
        imports.setdefault(room, set()).update(name for name in found if name not in (None, room))
    rooms = [
        Room(name, sum(counts), len(counts), tuple(sorted(imports[name])))
        for name, counts in lines.items()
    ]
    return sorted(rooms, key=lambda room: (room.is_plugin, room.name))


def read_budgets(path: Path = BUDGETS) -> dict[str, int]:
    """Most lines by room."""
    table: dict[str, dict[str, int]] = tomllib.loads(path.read_text(encoding="utf-8"))
    plugins = {f"{PLUGINS}/{name}": most for name, most in table["plugins"].items()}
    return table["core"] | plugins


def excesses(rooms: Sequence[Room], budgets: Mapping[str, int]) -> list[str]:
    """A sentence for each room that has more lines than its budget, or has none, and for each budget without a
    room."""
    said = [
        f"{room.name} has {room.num_lines} lines, {budgets[room.name]} are allowed"
        for room in rooms
        if room.num_lines > budgets.get(room.name, room.num_lines)
    ]
    names = {room.name for room in rooms}
    said += [f"{room.name} has no budget" for room in rooms if room.name not in budgets]
    return said + [f"there is no room {name}" for name in budgets if name not in names]


def tour_files(text: str) -> list[str]:
    """The files of Pagoda that `docs/tour.md` names: the way of a bare request."""
    return sorted(set(re.findall(r"`(pagoda/[\w/]+\.py)`", text)))


def table(rooms: Sequence[Room]) -> Iterator[str]:
    """The lines of the table."""
    width = max(len(room.name) for room in rooms)
    yield f"{'room':{width}}  lines  files  imports"
    for kind, is_plugin in (("core", False), ("plugins", True)):
        those = [room for room in rooms if room.is_plugin == is_plugin]
        for room in those:
            others = " ".join(room.imports)
            yield f"{room.name:{width}} {room.num_lines:6} {room.num_files:6}  {others}"
        num_lines, num_files = (
            sum(room.num_lines for room in those),
            sum(room.num_files for room in those),
        )
        yield f"{kind + ', all':{width}} {num_lines:6} {num_files:6}"
    files = tour_files(TOUR.read_text(encoding="utf-8"))
    num_lines = sum((ROOT / file).read_text(encoding="utf-8").count("\n") for file in files)
    yield f"{'tour of a request':{width}} {num_lines:6} {len(files):6}"


def main(arguments: Sequence[str]) -> int:
    rooms = read_rooms()
    if list(arguments) == ["--check"]:
        problems = excesses(rooms, read_budgets())
        for problem in problems:
            print(f"{BUDGETS.relative_to(ROOT)}: {problem}")
        return 1 if problems else 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for line in table(rooms):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
