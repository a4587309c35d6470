# SPDX-License-Identifier: Apache-2.0
"""The tour of the core stays short, keeps to the core, and names what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for path in (ROOT / "pagoda").rglob("*.py")
    if "plugins" not in path.parts
)
NAMES = sorted(set(re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", TOUR)))


def test_the_tour_is_short_and_of_the_core() -> None:
    assert TOUR.count("\n") <= 200
    assert "pagoda/plugins/" not in TOUR


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_that_of_a_class_and_what_it_has(name: str) -> None:
    kind, _, member = name.partition(".")
    [body] = re.findall(
        rf"^class {kind}\b.*?(?=^(?:class|def|@) ?\w)", SOURCES + "\nclass End", re.M | re.S
    )[:1]
    assert not member or re.search(rf"\b(?:def )?{member}\b", body)
