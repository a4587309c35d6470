"""A parser of a model's output: reasoning, tool calls, and the answer itself.

Reasoning stands between `<think>` tags at the beginning. A tool call stands between `<tool_call>` tags as
`{"name": ..., "arguments": {...}}` (Hermes, Qwen). The parser takes text deltas and returns deltas, so that
streams and whole answers are made by the same code. Text is held back only while it could be part of a tag, or
white space that a tag would swallow. Work is linear in the text, however the text is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
T = TypeVar("T")

MAX_HEAD_CHARS = 1024
"""The name of a call must come within so many characters to be streamed; names have at most 64."""
_CALL_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
)


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one tool call. The first piece has the name; the others add to `arguments`."""

    index: int
    name: str | None
    arguments: str


class AnswerDelta(msgspec.Struct, frozen=True):
    """The parts of an answer that one text delta adds."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @staticmethod
    def joined(deltas: Sequence[AnswerDelta]) -> AnswerDelta:
        return AnswerDelta(
            "".join(delta.content for delta in deltas),
            "".join(delta.reasoning for delta in deltas),
            tuple(piece for delta in deltas for piece in delta.tool_calls),
        )

    def first_call_only(self) -> AnswerDelta:
        calls = tuple(piece for piece in self.tool_calls if piece.index == 0)
        return AnswerDelta(self.content, self.reasoning, calls)


_Steps = Generator[None, str | None, T]
"""Work that is sent the next piece of text at each `yield`, and None at the end of the text."""


class OutputParser:
    """Parses one answer as it grows."""

    def __init__(
        self, *, thinks: bool = False, in_reasoning: bool = False, calls_tools: bool = False
    ) -> None:
        """`thinks`: reasoning may come first. `in_reasoning`: the prompt has already opened it."""
        self.num_calls = 0
        self._calls_tools = calls_tools
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._in_content = False
        self._in_arguments = False
        self._skip_space = in_reasoning
        """White space is dropped until other text comes: a tag was before it."""
        self._steps = self._parse(thinks=thinks, in_reasoning=in_reasoning)
        next(self._steps)

    @property
    def one_call_complete(self) -> bool:
        return self.num_calls > self._in_arguments

    @property
    def transparent(self) -> bool:
        """All further text is content, so the parser need not see it."""
        return self._in_content and not (self._calls_tools or self._skip_space)

    def push(self, text: str) -> AnswerDelta:
        if self.transparent:
            return AnswerDelta(text)
        self._steps.send(text)
        return self._drain()

    def flush(self) -> AnswerDelta:
        """The parts that were held back, once no more text follows."""
        with suppress(StopIteration):
            self._steps.send(None)
        return self._drain()

    def _drain(self) -> AnswerDelta:
        delta = AnswerDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        for parts in (self._content, self._reasoning, self._calls):
            parts.clear()
        return delta

    def _parse(self, *, thinks: bool, in_reasoning: bool) -> _Steps[None]:
        text = yield
        if thinks and not in_reasoning:
            in_reasoning, text = yield from self._begin(text)
        if in_reasoning:
            text = yield from self._until(THINK_END, self._reasoning, text)
        self._in_content = True
        while text is not None:
            if self._calls_tools:
                text = yield from self._until(CALL, self._content, text)
                if text is not None:
                    text = yield from self._call(text)
            else:
                self._emit(self._content, text)
                text = yield

    def _begin(self, text: str | None) -> _Steps[tuple[bool, str | None]]:
        """Returns True and the text behind `<think>`, or False and all text if it begins in another way."""
        search, held = _TagSearch(THINK), list[str]()
        while text is not None:
            before, behind = search.feed(text)
            held.append(before)
            if before and not before.isspace():
                return False, "".join(held) + search.rest(behind)
            if behind is not None:
                self._skip_space = True
                return True, behind
            text = yield
        self._emit(self._content, "".join(held) + search.held)
        return False, None

    def _until(self, tag: str, part: list[str], text: str | None) -> _Steps[str | None]:
        """Emits text up to `tag` without the white space around it; returns the text behind the tag."""
        search, held = _TagSearch(tag), list[str]()
        while text is not None:
            before, behind = search.feed(text)
            solid = before.rstrip()
            if solid:
                self._emit(part, "".join(held) + solid)
                held = []
            if behind is not None:
                self._skip_space = True
                return behind
            if not self._skip_space:
                held.append(before[len(solid) :])
            text = yield
        rest = "".join(held) + search.held
        self._emit(part, rest if part is self._content else rest.rstrip())
        return None

    def _emit(self, part: list[str], text: str) -> None:
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        if text:
            part.append(text)

    def _call(self, text: str | None) -> _Steps[str | None]:
        """Emits a call, or content if it turns out to be none; returns the text behind its closing tag.

        The arguments are emitted as they come if the call begins with its name, in the usual order.
        """
        search, held, may_be_head = _TagSearch(CALL_END), list[str](), True
        behind = None
        while text is not None and behind is None:
            before, behind = search.feed(text)
            held.append(before)
            if may_be_head:
                body = "".join(held)
                held = [body]
                head = _CALL_HEAD.match(body, 0, MAX_HEAD_CHARS)
                name = None if head is None else _decoded(head.group(1))
                if head is not None and name is not None:
                    self._add_piece(name, "")
                    return (yield from self._arguments(body[head.end() :] + search.rest(behind)))
                may_be_head = head is None and len(body) < MAX_HEAD_CHARS
            if behind is None:
                text = yield
        call = _parse_call(body := "".join(held) + search.held)
        if call is not None:
            self._add_piece(*call)
        else:
            self._skip_space = False
            self._emit(self._content, CALL + body + ("" if behind is None else CALL_END))
        self._skip_space |= behind is not None
        return behind

    def _arguments(self, text: str | None) -> _Steps[str | None]:
        """Emits the arguments of a call; returns the text behind the closing tag of the call."""
        scanner, search = _ObjectScanner(), _TagSearch(CALL_END)
        self._in_arguments = True
        while text is not None:
            if self._in_arguments:
                end = scanner.scan(text)
                self._in_arguments = end is None
                if text[:end]:
                    self._add_piece(None, text[:end])
                text = "" if end is None else text[end:]
            _, behind = search.feed(text)
            if behind is not None:
                self._skip_space = True
                return behind
            text = yield
        return None

    def _add_piece(self, name: str | None, arguments: str) -> None:
        """A name begins the next call; None adds to the last one. One delta has at most one piece of a call."""
        self.num_calls += name is not None
        index = self.num_calls - 1
        if self._calls and self._calls[-1].index == index:
            last = self._calls.pop()
            name, arguments = last.name, last.arguments + arguments
        self._calls.append(ToolCallDelta(index, name, arguments))


class _TagSearch:
    """Finds the first occurrence of a tag in a text that comes in pieces."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self.held = ""
        """The end of the text so far, if the tag may begin there."""

    def rest(self, behind: str | None) -> str:
        """The text that `feed` has not returned as certain, with the tag and `behind` if the tag was found."""
        return self.held if behind is None else self._tag + behind

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is certainly before the tag, and the text behind the tag once the tag is complete."""
        text = self.held + text
        before, tag, behind = text.partition(self._tag)
        self.held = ""
        if tag:
            return before, behind
        lengths = range(min(len(self._tag) - 1, len(text)), 0, -1)
        overlap = next((n for n in lengths if text.endswith(self._tag[:n])), 0)
        certain = len(text) - overlap
        self.held = text[certain:]
        return text[:certain], None


class _ObjectScanner:
    """Finds the end of JSON objects in a text that comes in pieces. One object may follow another."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, piece: str) -> int | None:
        """The index behind the closing brace, or None if the object goes on."""
        for index, character in enumerate(piece):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None


def _decoded(literal: str) -> str | None:
    """The value of a JSON string; None if it has an escape that JSON does not know."""
    try:
        value: str = json.loads(literal, strict=False)
    except ValueError:
        return None
    return value


def _parse_call(body: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call in any order of keys."""
    try:
        call = json.loads(body, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return call["name"], arguments
    return call["name"], json.dumps(arguments, ensure_ascii=False)
