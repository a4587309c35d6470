# SPDX-License-Identifier: Apache-2.0
"""Grammars in llguidance's dialect of Lark, put together as text.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagoda.messages.frontend import Grammar

TEXT = "PAGODA_TEXT"
"""Any text without added tokens."""
GAP = "PAGODA_GAP"
"""A little white space."""
_JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CONTENT = "pagoda_start"
"""Name of the start rule of a grammar within another."""
_UNESCAPED_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_IN_LARK = re.compile(
    r"""(?P<kept>"(?:\\.|[^"\\\n])*"?|/(?![/*])(?:\\.|[^/\\\n])+/?|//[^\n]*)"""
    r"""|(?P<directive>%llguidance[^\n]*)|(?P<start>\bstart\b)"""
)


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def _renamed(match: re.Match[str]) -> str:
    if match["start"]:
        return _CONTENT
    return "" if match["directive"] else match[0]


class LarkWriter:
    """Rules of one grammar. Tags that are tokens of the model are written as such."""

    def __init__(self, added_token_id: Callable[[str], int | None], tags: Sequence[str]) -> None:
        """`added_token_id` gives the id of an added token; `tags` may be such tokens."""
        self._ids = {tag: token_id for tag in tags if (token_id := added_token_id(tag)) is not None}
        names = "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True)))
        self._split = re.compile(f"({names})" if names else "(?!)()")
        self._content = ""
        """The grammar within this one, if it has rules of its own."""
        self._rules = [r"PAGODA_TEXT: /(?s:.*)/", r"PAGODA_GAP: /[ \t\n]{0,8}/"]

    def is_token(self, tag: str) -> bool:
        return tag in self._ids

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule; returns its name."""
        name = f"pagoda_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Adds a terminal, a regular expression; returns its name."""
        name = f"PAGODA_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """An expression for a text with tags."""
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in self._split.split(text)
            if part
        )

    def json(self, schema: Mapping[str, Any], *, is_strict: bool) -> str:
        """A rule for a JSON value. If it is not strict, keywords that grammars do not know are passed over."""
        options = {"x-guidance": {**_JSON_LAYOUT, "lenient": not is_strict}}
        return self.rule(f"%json {json.dumps({**schema, **options})}")

    def content(self, grammar: Grammar) -> str:
        """An expression for the language of a whole grammar."""
        if grammar.kind == "json_schema":
            return self.rule(f"%json {grammar.text}")
        if grammar.kind == "regex":
            return self.terminal(f"/{_UNESCAPED_SLASH.sub(_escaped, grammar.text)}/")
        self._content = _IN_LARK.sub(_renamed, grammar.text)
        return _CONTENT

    def text_without(self, pattern: str, *, at_lines: bool = False) -> str:
        """A terminal for any text in which a regular expression matches nothing; with `at_lines` nothing at the
        beginning of a line."""
        before = r"((?s:.*)\n)?" if at_lines else "(?s:.*)"
        whole = f"{before}({pattern})(?s:.*)"
        return self.terminal(f"/(?s:.*)/ & ~/{_UNESCAPED_SLASH.sub(_escaped, whole)}/")

    def until(self, *endings: str, text: str = TEXT, max_tokens: int | None = None) -> str:
        """An expression for `text`, by default any, and one of `endings` behind it, which are tags of one kind.

        `max_tokens` bounds the text, which then ends; the first tag of an ending must be a token for that.
        """
        parts = [[part for part in self._split.split(ending) if part] for ending in endings]
        whole = " | ".join(map(self.literal, endings))
        if max_tokens == 0:
            return f"({whole})"
        if parts[0][0] in self._ids:
            bound = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
            body = self.rule(text, bound) if bound else text
            return f"{body} ({whole})"
        firsts = " | ".join(json.dumps(first, ensure_ascii=False) for first, *_ in parts)
        body = self.rule(f"{text} ({firsts})", "[lazy]")
        rests = " | ".join(self.literal("".join(rest)) or '""' for _, *rest in parts)
        return f"{body} ({rests})"

    def grammar(self, start: str) -> str:
        """The grammar whose answers are `start`."""
        # A grammar within this one comes first, so that lines in errors are those of its author.
        head = self._content or "%llguidance {}"
        return "\n".join((head, f"start: {start}", *self._rules, ""))
