# SPDX-License-Identifier: Apache-2.0
"""Names of modules in strings, comments and documents: what is moved may be started by its name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?<![\w.@/-])pagoda(?:\.[a-zA-Z_]\w*)+")
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
OTHERS = {"pagoda.backend._native", "pagoda.__file__", "pagoda.checkpoints.__file__", "pagoda.key"}
"""A module that is built, an attribute of all modules, and a key of spans."""


def _files() -> Iterator[Path]:
    for pattern in ("pagoda/**/*.py", "csrc/**/*", "docs/**/*.md", "benchmarks/**/*.py", "*.md"):
        yield from (
            path
            for path in ROOT.glob(pattern)
            if path.is_file() and "tests" not in path.parts and path.name != "CHANGELOG.md"
        )


def _exists(name: str) -> bool:
    """True of a package, a module, or what a module has."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:end])
        for module in (place.with_suffix(".py"), place / "__init__.py"):
            if module.is_file():
                inner = parts[end:]
                return not inner or re.search(rf"\b{inner[0]}\b", module.read_text()) is not None
    return False


def test_names_of_modules_exist() -> None:
    known = GROUPS.keys() | OTHERS
    found = {
        (name, str(path.relative_to(ROOT)))
        for path in _files()
        for name in NAME.findall(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 1000
    wrong = [it for it in found if it[0] not in known and not _exists(it[0])]
    assert sorted(wrong) == []
