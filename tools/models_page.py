# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/models.md from the families that there are: `make docs`."""

from __future__ import annotations

import itertools
from pathlib import Path

from pagoda.checkpoints.families import FAMILIES
from pagoda.checkpoints.family import Family

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_HEAD = "|---|---|---|---|---|"


def _row(family: Family) -> str:
    others = [family.architecture, *sorted(family.aliases)]
    kinds = ", ".join(f"`{kind}`" for kind in sorted(family.model_types))
    gguf = "–" if family.gguf is None else f"`{family.gguf.architecture}`"
    names = ", ".join(f"`{name}`" for name in others)
    title = family.architecture.removesuffix("ForCausalLM").removesuffix("Model")
    title = title.removesuffix("LMHead").removesuffix("ForConditionalGeneration")
    title = title.replace("ForSequenceClassification", ", with a score")
    return f"| {title} | {family.models} | {names} | {kinds or '–'} | {gguf} |"


def page() -> str:
    """The text of docs/models.md with a row for each family."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(_HEAD) + 1
    behind = itertools.dropwhile(lambda line: line.startswith("|"), lines[start:])
    rows = [_row(family) for family in FAMILIES.values()]
    return "\n".join([*lines[:start], *rows, *behind]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
