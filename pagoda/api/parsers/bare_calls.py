# SPDX-License-Identifier: Apache-2.0
"""Tool calls without tags of their own: JSON objects, or a Python list of calls with keyword arguments.

Models (Llama 3 and 4) are asked for one spelling and write the other, with text in front of it, or in a code
block. So both are read wherever a line begins with one; what is no call of a tool that was offered is content.
"""

from __future__ import annotations

import re

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.api.parsers.json_calls import FENCE, read_calls, read_closers, read_fence
from pagoda.api.parsers.json_text import dumped
from pagoda.api.parsers.literals import read_literal
from pagoda.api.parsers.schemas import ToolSchemas
from pagoda.text.text_source import Steps, Tags, TextSource

_CALL_TAGS = ("<|python_tag|>", "<|python_start|>")
_BEGINNINGS = Tags(*_CALL_TAGS, "\n{", "\n[", "\n" + FENCE)
_END = "<|python_end|>"
_NAME = re.compile(r"[\w.\-]*")
_KEYWORD = re.compile(r"[^\"'()\[\]{}*]+")


def read_bare(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`{"name": ..., "parameters": {...}}; ...` or `[f(a=1), g(b="x")]`, also behind a tag that begins Python."""
    yield from _read_some(source, answer, tools, "", is_first=True)
    while (tag := (yield from source.until(_BEGINNINGS, answer.add_content))) is not None:
        is_tagged = tag in _CALL_TAGS
        if not is_tagged:
            answer.add_content("\n")
            source.put_back(tag[1:])
        yield from _read_some(source, answer, tools, tag if is_tagged else "")


def _read_some(
    source: TextSource,
    answer: AnswerBuilder,
    tools: ToolSchemas,
    tag: str,
    *,
    is_first: bool = False,
) -> Steps[None]:
    """Reads the calls that come next, behind `tag`. Without any, the text that was taken becomes content."""
    taken = tag + (yield from read_fence(source))
    is_list = yield from source.accept("[")
    inner = (yield from source.spaces()) if is_list else ""
    character = yield from source.peek()
    if character in ("{", "["):
        source.put_back(("[" if is_list else "") + inner)
        yield from read_calls(source, answer, tools, taken, _END, is_known=not tag)
    elif (is_list or tag) and (character.isalpha() or character == "_"):
        taken += ("[" if is_list else "") + inner
        yield from _read_python(source, answer, tools, taken, is_known=not tag and not is_first)
    else:
        answer.add_content(taken + ("[" if is_list else "") + inner)


def _read_python(
    source: TextSource, answer: AnswerBuilder, tools: ToolSchemas, taken: str, *, is_known: bool
) -> Steps[None]:
    """Reads calls with commas between them; from the first element on that is none, text is content."""
    closers = ("]", FENCE) if FENCE in taken else ("]",)
    found = False
    while True:
        name = yield from source.run(_NAME)
        body = name
        call = None
        if name and (yield from source.accept("(")):
            body += "("
            if tools.offers(name) or (not is_known and _is_python_name(name)):
                text, keywords = yield from _collect_arguments(source)
                body += text
                call = None if keywords is None else _parse_arguments(keywords)
        if call is None:
            break
        found = True
        answer.begin_call(tools.meant(name))
        answer.add_arguments(call)
        answer.end_call()
        taken = yield from source.spaces()
        if (yield from source.accept(",")):
            taken = yield from source.spaces()
    if not found or body:
        answer.add_content(taken + body)
    else:
        source.put_back(taken)
        yield from read_closers(source, closers, _END)


def _is_python_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _collect_arguments(source: TextSource) -> Steps[tuple[str, list[str] | None]]:
    """Takes the arguments of a call and the bracket that closes them. Returns their text, and the text of each;
    None if the call does not end."""
    scanner, parts = _Scanner(), list[str]()
    while text := (yield from source.take_some()):
        end = scanner.scan(text)
        parts.append(text[:end])
        if end is not None:
            source.put_back(text[end:])
            whole = "".join(parts)
            ends = [*scanner.commas, len(whole) - 1]
            begins = [0, *(comma + 1 for comma in scanner.commas)]
            return whole, [whole[a:b] for a, b in zip(begins, ends, strict=True)]
    return "".join(parts), None


class _Scanner:
    """Finds the commas between the arguments of a Python call, and its end, in a text that comes in pieces."""

    def __init__(self) -> None:
        self.commas: list[int] = []
        """Indexes of the commas in the whole text."""
        self._num_scanned = 0
        self._depth = 1
        self._quote = ""
        self._escaped = False

    def scan(self, piece: str) -> int | None:
        """The index behind the closing bracket."""
        for index, character in enumerate(piece):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "'\"":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if not self._depth:
                    return index + 1
            elif character == "," and self._depth == 1:
                self.commas.append(self._num_scanned + index)
        self._num_scanned += len(piece)
        return None


def _parse_arguments(keywords: list[str]) -> str | None:
    """The JSON text of keyword arguments; None if they are something else."""
    if not keywords[-1].strip():
        keywords.pop()
    arguments: dict[str, object] = {}
    try:
        for keyword in keywords:
            name, _, value = keyword.partition("=")
            if not _KEYWORD.fullmatch(name.strip()):
                return None
            arguments[name.strip()] = read_literal(value)
        return dumped(arguments)
    except ValueError:
        return None
