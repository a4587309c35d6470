# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:pagoda|tests|benchmarks|tools|docs)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_every_flag_of_serve_is_documented() -> None:
    from dataclasses import fields

    from pagoda.cli.options import GeneralOptions
    from pagoda.cli.serve import ServerOptions
    from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions

    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    groups = (ServerOptions, EngineOptions, ParallelOptions, ExecutorOptions, GeneralOptions)
    for group in groups:
        for field in fields(group):
            assert f"--{field.name.replace('_', '-')}" in text


def test_every_route_is_documented() -> None:
    from pagoda.api.routes import ROUTES

    text = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    for route, methods in ROUTES.items():
        shown = route.replace("*", "{id}")
        for method in methods:
            assert f"`{method} {shown}`" in text


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_every_package_is_in_the_table_of_packages() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `pagoda/(\w+)/` \|", text, re.MULTILINE))
    assert told == {path.parent.name for path in ROOT.glob("pagoda/*/__init__.py")}


def test_what_the_recipes_look_for_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    searches = re.findall(r"`git grep -l (\w+) -- ([\w/ ]+)`", text)
    assert searches
    for word, places in searches:
        for place in places.split():
            files = [path for path in (ROOT / place).rglob("*") if path.suffix in (".py", ".h")]
            assert any(word in path.read_text(encoding="utf-8") for path in files), (word, place)
