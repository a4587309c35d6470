# SPDX-License-Identifier: Apache-2.0
"""Grammars in EBNF, as llama.cpp (GBNF) and vLLM write them, as grammars in llguidance's dialect of Lark.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. Rules that lead back to themselves become
rules; all others become terminals, that is regular expressions, which are much faster to follow.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple, NoReturn

from pagoda.errors import refuse

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<begin>[A-Za-z_][\w-]*)(?=\s*::=)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<is>::=)
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<chars>\[\^?(?:\\.|[^\]\\\n])*\])
    |(?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|\??start\s*:(?!:))")
_ROOTS = ("root", "start")
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_SPECIAL = re.compile(r"[\\/\[\]\^\-&~]")


class _Part(NamedTuple):
    kind: str
    text: str


def is_lark(text: str) -> bool:
    """True if a grammar is in Lark's syntax already."""
    return _LARK.search(text) is not None


def lark_of_ebnf(text: str, param: str) -> str:
    """The grammar in Lark. Raises InvalidRequestError: it is not EBNF; names `param`, line and column."""
    rules = _parsed(text, param)
    root = next((name for name in _ROOTS if name in rules), None)
    if root is None:
        refuse(param, "has no rule named root, at which an answer begins")
    for name, parts in rules.items():
        for part in parts:
            if part.kind == "name" and part.text not in rules:
                refuse(param, f"has no rule {part.text[:64]!r}, which the rule {name[:64]!r} names")
    terminals = _without_recursion(rules)
    names = {
        name: f"{'E' if name in terminals else 'e'}_{index}" for index, name in enumerate(rules)
    }
    lines = [f"start: {names[root]}"]
    for name, parts in rules.items():
        body = " ".join(names[part.text] if part.kind == "name" else part.text for part in parts)
        lines.append(f"{names[name]}: {body or json.dumps('')}")
    return "\n".join((*lines, ""))


def _parsed(text: str, param: str) -> dict[str, list[_Part]]:
    """The parts of each rule, in Lark's spelling but for the names of rules."""
    rules: dict[str, list[_Part]] = {}
    current: list[_Part] | None = None
    position, depth = 0, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        kind = match.lastgroup if match is not None else None
        if match is None or kind is None or (kind not in ("space", "begin") and current is None):
            _refuse_at(text, position, param, "is not EBNF")
        token, position = match.group(), match.end()
        if kind == "begin":
            if token in rules:
                _refuse_at(text, match.start(), param, "defines a rule again")
            if depth:
                _refuse_at(text, match.start(), param, "lacks a closing parenthesis")
            current = rules[token] = []
        elif kind == "mark" and token in "()":
            depth += 1 if token == "(" else -1
            if depth < 0:
                _refuse_at(text, match.start(), param, "has a parenthesis too many")
        if current is not None and kind not in ("space", "begin", "is"):
            current.append(_part(kind, token, param))
    if depth:
        _refuse_at(text, len(text), param, "lacks a closing parenthesis")
    return rules


def _refuse_at(text: str, position: int, param: str, fault: str) -> NoReturn:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    refuse(param, f"{fault} at line {line}, column {column}")


def _part(kind: str, token: str, param: str) -> _Part:
    match kind:
        case "string":
            return _Part(kind, json.dumps(_unescaped(token[1:-1], param), ensure_ascii=False))
        case "chars":
            return _Part(kind, f"/{_char_class(token, param)}/")
        case "count":
            return _Part(kind, re.sub(r"\s", "", token))
        case "mark" if token == ".":
            return _Part(kind, "/(?s:.)/")
    return _Part(kind, token)


def _unescaped(text: str, param: str) -> str:
    def char(match: re.Match[str]) -> str:
        escape = match[1]
        if len(escape) == 1:
            return _CONTROLS.get(escape, escape)
        code = int(escape[1:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            refuse(param, f"has the escape {match[0]!r}, which is no character")
        return chr(code)

    return _ESCAPE.sub(char, text)


def _char_class(token: str, param: str) -> str:
    """A class of characters as a regular expression, whose only special characters are those of ranges."""
    inner = token[1:-1]
    negated = inner.startswith("^")
    parts = re.findall(r"\\(?:x..|u....|U........|.)|.", inner[negated:], re.DOTALL)
    spelled = []
    for index, part in enumerate(parts):
        if part == "-" and 0 < index < len(parts) - 1:
            spelled.append("-")
            continue
        char = _unescaped(part, param)
        spelled.append(_SPECIAL.sub(r"\\\g<0>", char) if char.isprintable() else _hex(char))
    return f"[{'^' if negated else ''}{''.join(spelled)}]" if spelled else "(?s:.)"


def _hex(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


def _without_recursion(rules: dict[str, list[_Part]]) -> set[str]:
    """Rules that never lead back to themselves, found from those that name no others."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    missing: dict[str, set[str]] = {}
    for name, parts in rules.items():
        missing[name] = {part.text for part in parts if part.kind == "name"}
        for used in missing[name]:
            users[used].add(name)
    ready = [name for name, names in missing.items() if not names]
    found: set[str] = set()
    while ready:
        done = ready.pop()
        found.add(done)
        for user in users[done]:
            missing[user].discard(done)
            if not missing[user]:
                ready.append(user)
    return found
