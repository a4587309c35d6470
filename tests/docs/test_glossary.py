# SPDX-License-Identifier: Apache-2.0
"""The glossary has one line for each term, and names modules and what is in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| term |"))
]
PLACES = [found for line in LINES for found in re.findall(r"`([\w.]+)` in `([\w/.]+)`", line[-1])]


def test_each_term_has_a_line_with_a_name_of_each_system() -> None:
    assert len({line[0] for line in LINES}) == len(LINES) > 40
    assert all(len(line) == 6 and all(line) for line in LINES)
    named = [line for line in LINES if line[-1] != "–"]
    assert {line[0] for line in LINES if line not in named} == {"encoder cache"}
    assert all(re.search("` in `", line[-1]) for line in named)


@pytest.mark.parametrize(("name", "module"), PLACES)
def test_a_name_is_defined_in_its_module(name: str, module: str) -> None:
    source = (ROOT / module).read_text(encoding="utf-8")
    first, _, member = name.partition(".")
    assert re.search(rf"^(?:class|def) {first}\b|^    {first}: ", source, re.M)
    if member:
        [body] = re.findall(
            rf"^class {first}\b.*?(?=^(?:class|def|@) ?\w)", source + "\nclass End", re.M | re.S
        )
        assert re.search(rf"\bdef {member}\b", body)
