# SPDX-License-Identifier: Apache-2.0
"""References between the rules of a grammar in Lark's syntax, checked before it is compiled.

llguidance follows names by recursion, and wraps an error once for each rule on the way to it: time that grows with
the square of the way. https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import re
from bisect import bisect_right

from pagoda.errors import refuse

MAX_REFERENCES = 200
"""Rules that may be between the start and a rule, along the way on which they are found."""
_TOKEN = re.compile(
    r"""(?P<skipped>"(?:\\.|[^"\\\n])*(?:"i?)?|//[^\n]*|/(?!\*)(?:\\.|[^/\\\n])+(?:/[imslux]*)?"""
    r"""|\#[^\n]*|<[^<>\n]*>|->\s*\w+|%llguidance[^\n]*)"""
    r"""|\[(?:"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|[^\[\]"/\n])*\](?=[ \t]*:)"""
    r"""|(?P<foreign>%(?!ignore\b)\w+|::|\{\s*[A-Za-z_]|@)"""
    r"""|%\w+|(?P<name>[A-Za-z_]\w*)|(?P<colon>:)"""
)


def check_references(text: str, param: str) -> None:
    """Refuses names without a rule, and chains of rules that are too long, in time that is linear in the text.

    Names are not looked for in a grammar with imports, embedded grammars or parameters of rules, whose names this
    check does not know.
    Raises InvalidRequestError: names `param`, line and column.
    """
    rules: dict[str, list[tuple[str, int]]] = {}
    current: list[tuple[str, int]] = []
    before: tuple[str, int] | None = None
    """The name that the next colon would make that of a rule."""
    is_foreign = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "name":
            before = match[0], match.start()
            current.append(before)
        elif kind == "colon" and before is not None and current:
            name, _ = current.pop()
            current = rules.setdefault(name, [])
            before = None
        elif kind == "foreign":
            is_foreign = True
    starts = [match.end() for match in re.finditer("^|\n", text)]
    if not is_foreign:
        for references in rules.values():
            for name, position in references:
                if name not in rules:
                    where = _place(starts, position)
                    refuse(param, f"names {name[:64]!r} at {where}, which is no rule")
    _check_depth(rules, starts, param)


def _check_depth(rules: dict[str, list[tuple[str, int]]], starts: list[int], param: str) -> None:
    """Follows the rules from the start, depth first and each once, as the compiler does."""
    seen = {"start"}
    way = [iter(rules.get("start", ()))]
    while way:
        name, position = next(way[-1], ("", 0))
        if not name:
            way.pop()
        elif name in rules and name not in seen:
            if len(way) >= MAX_REFERENCES:
                where = _place(starts, position)
                refuse(param, f"has more than {MAX_REFERENCES} rules in a chain, at {where}")
            seen.add(name)
            way.append(iter(rules[name]))


def _place(starts: list[int], position: int) -> str:
    line = bisect_right(starts, position)
    return f"line {line}, column {position - starts[line - 1] + 1}"
