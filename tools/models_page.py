# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/models.md, of families and of refused architectures: `make docs`."""

from __future__ import annotations

import itertools
from pathlib import Path

from pagoda.checkpoints.families import FAMILIES
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.refused import REFUSED, Refusal

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_SERVED, _REFUSED = "|---|---|---|---|---|", "|---|---|---|"


def _row(family: Family) -> str:
    others = [family.architecture, *sorted(family.aliases)]
    kinds = ", ".join(f"`{kind}`" for kind in sorted(family.model_types))
    forms = dict.fromkeys(f"`{form.architecture}`" for form in family.gguf_formats)
    names = ", ".join(f"`{name}`" for name in others)
    title = family.architecture.removesuffix("ForCausalLM").removesuffix("Model")
    title = title.removesuffix("LMHead").removesuffix("ForConditionalGeneration")
    title = title.replace("ForSequenceClassification", ", with a score")
    return f"| {title} | {family.models} | {names} | {kinds or '–'} | {', '.join(forms) or '–'} |"


def _refused_rows() -> list[str]:
    """A row for all architectures that are refused for the same, and have the same nearest."""
    alike: dict[Refusal, list[str]] = {}
    for name, refusal in REFUSED.items():
        alike.setdefault(refusal, []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {it.reason} | `{it.nearest}` |" for it, names in alike.items()]


def _with_rows(lines: list[str], head: str, rows: list[str]) -> list[str]:
    """The lines with these rows in the table of that head."""
    start = lines.index(head) + 1
    behind = itertools.dropwhile(lambda line: line.startswith("|"), lines[start:])
    return [*lines[:start], *rows, *behind]


def page() -> str:
    """The text of docs/models.md with a row for each family, and for architectures that are refused."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    lines = _with_rows(lines, _SERVED, [_row(family) for family in FAMILIES.values()])
    return "\n".join(_with_rows(lines, _REFUSED, _refused_rows())) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
