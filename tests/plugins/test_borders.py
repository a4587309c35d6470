# SPDX-License-Identifier: Apache-2.0
"""Borders between the core and plugins: of all imports, also those for type checking and those of tests."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pagoda"
PLUGINS = {path.parent.name for path in (PACKAGE / "plugins").glob("*/__init__.py")}
IMPORT = re.compile(r"^\s*(?:from|import)\s+pagoda\.plugins\.(\w+)", re.MULTILINE)
SUBJECTS = {"sim", "simulate", "backend_check"}
"""Simulated workers and engines, and cases for backends, with which tests of many plugins compute."""
RUN_BY = {"simulate": {"disaggregation", "plan", "router", "sim", "trace"}}
"""Plugins that another one runs as they are, in virtual time, or whose files it reads."""
OTHERS_IN_TESTS = {"router": {"disaggregation", "trace"}, "epp": {"router"}}
"""Plugins that tests of a plugin run together with it."""


def _imports() -> Iterator[tuple[Path, str]]:
    """Each file of the package, and each plugin that it imports."""
    for path in PACKAGE.rglob("*.py"):
        for plugin in IMPORT.findall(path.read_text(encoding="utf-8")):
            yield path.relative_to(PACKAGE), plugin


def _is_allowed(path: Path, plugin: str) -> bool:
    match path.parts:
        case "plugins", owner, "tests", *_:
            others = OTHERS_IN_TESTS.get(owner, set()) | RUN_BY.get(owner, set())
            return plugin in {owner, *SUBJECTS, *others}
        case "plugins", owner, *_:
            return plugin in {owner, *RUN_BY.get(owner, ())}
    return False


def test_nobody_imports_a_plugin_but_itself_and_named_tests() -> None:
    found = list(_imports())
    assert {plugin for _, plugin in found} <= PLUGINS
    assert [(str(path), plugin) for path, plugin in found if not _is_allowed(path, plugin)] == []
    for owner, others in OTHERS_IN_TESTS.items():
        assert others <= {plugin for path, plugin in found if path.parts[1] == owner}


def test_the_contracts_name_every_room_and_every_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {it["name"]: it for it in project["tool"]["importlinter"]["contracts"]}
    rooms = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    rooms |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"plugins"}
    core = contracts["the core knows no plugin"]["source_modules"]
    assert set(core) == {f"pagoda.{room}" for room in rooms}
    independent = contracts["no plugin knows another"]["modules"]
    assert set(independent) == {f"pagoda.plugins.{plugin}" for plugin in PLUGINS}
