"""A parser of a model's output: reasoning, tool calls, and the answer itself.

Reasoning stands between `<think>` tags at the beginning. A tool call stands between `<tool_call>` tags as
`{"name": ..., "arguments": {...}}` (Hermes, Qwen). The parser takes text deltas and returns deltas, so that
streams and whole answers are made by the same code. Text is held back only while it could be part of a tag, or
white space that a tag would swallow. Work is linear in the text, however the text is cut.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence

import msgspec

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

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


class _State(enum.Enum):
    BEGIN = enum.auto()
    """Nothing but white space has come; reasoning may begin."""
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL_HEAD = enum.auto()
    CALL_ARGUMENTS = enum.auto()
    CALL_TAIL = enum.auto()
    """The arguments of a call are complete, its closing tag has not come."""


class OutputParser:
    """Parses one answer as it grows."""

    def __init__(
        self, *, thinks: bool = False, in_reasoning: bool = False, calls_tools: bool = False
    ) -> None:
        """`thinks`: reasoning may come first. `in_reasoning`: the prompt has already opened it."""
        self._calls_tools = calls_tools
        self.num_calls = 0
        self._scanner = _ObjectScanner()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._state = _State.CONTENT
        self._search = _TagSearch(CALL)
        self._held: list[str] = []
        """White space that the next tag would swallow; in CALL_HEAD all of the call so far."""
        self._skip_space = False
        """White space is dropped until other text comes: a tag was before it."""
        self._may_be_head = False
        if in_reasoning:
            self._enter(_State.REASONING)
        elif thinks:
            self._state = _State.BEGIN
            self._search = _TagSearch(THINK)

    @property
    def one_call_complete(self) -> bool:
        is_open = self._state is _State.CALL_ARGUMENTS
        return self.num_calls > is_open

    @property
    def transparent(self) -> bool:
        """All further text is content, so the parser need not see it."""
        return self._state is _State.CONTENT and not (self._calls_tools or self._skip_space)

    def push(self, text: str) -> AnswerDelta:
        if self.transparent:
            return AnswerDelta(text)
        rest: str | None = text
        while rest is not None:
            rest = self._step(rest)
        return self._drain()

    def flush(self) -> AnswerDelta:
        text = "".join(self._held) + self._search.held
        self._held = []
        match self._state:
            case _State.BEGIN | _State.CONTENT:
                self._emit(self._content, text)
            case _State.REASONING:
                self._emit(self._reasoning, text.rstrip())
            case _State.CALL_HEAD:
                self._finish_odd_call(text, closed=False)
            case _State.CALL_ARGUMENTS | _State.CALL_TAIL:
                pass
        return self._drain()

    def _drain(self) -> AnswerDelta:
        delta = AnswerDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return delta

    def _step(self, text: str) -> str | None:
        """Takes in `text`; returns the text behind the tag that ended the state, or None."""
        match self._state:
            case _State.BEGIN:
                return self._begin(text)
            case _State.REASONING:
                return self._until_tag(text, self._reasoning, _State.CONTENT)
            case _State.CONTENT if self._calls_tools:
                return self._until_tag(text, self._content, _State.CALL_HEAD)
            case _State.CONTENT:
                self._emit(self._content, text)
                return None
            case _State.CALL_HEAD:
                return self._call_head(text)
            case _State.CALL_ARGUMENTS:
                return self._call_arguments(text)
            case _State.CALL_TAIL:
                _, behind = self._search.feed(text)
                if behind is not None:
                    self._enter(_State.CONTENT)
                return behind

    def _enter(self, state: _State) -> None:
        self._state = state
        self._skip_space = True
        self._held = []
        self._may_be_head = state is _State.CALL_HEAD
        next_tag = {_State.REASONING: THINK_END, _State.CONTENT: CALL}
        self._search = _TagSearch(next_tag.get(state, CALL_END))

    def _begin(self, text: str) -> str | None:
        before, behind = self._search.feed(text)
        if not before.isspace() and before:
            text = "".join(self._held) + before + self._search.held
            text += "" if behind is None else THINK + behind
            self._enter(_State.CONTENT)
            self._skip_space = False
            return text
        if behind is None:
            self._held.append(before)
        else:
            self._enter(_State.REASONING)
        return behind

    def _until_tag(self, text: str, part: list[str], following: _State) -> str | None:
        """Emits text up to the tag that is searched for, without the white space around it."""
        before, behind = self._search.feed(text)
        solid = before.rstrip()
        if solid:
            self._emit(part, "".join(self._held) + solid)
            self._held = []
        if behind is not None:
            self._enter(following)
        elif not self._skip_space and len(solid) < len(before):
            self._held.append(before[len(solid) :])
        return behind

    def _emit(self, part: list[str], text: str) -> None:
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        if text:
            part.append(text)

    def _call_head(self, text: str) -> str | None:
        before, behind = self._search.feed(text)
        self._held.append(before)
        if self._may_be_head:
            body = "".join(self._held)
            self._held = [body]
            head = _CALL_HEAD.match(body, 0, MAX_HEAD_CHARS)
            name = None if head is None else _decoded(head.group(1))
            if head is not None and name is not None:
                rest = body[head.end() :] + self._search.held
                self._begin_call(name)
                self._state = _State.CALL_ARGUMENTS
                return rest if behind is None else rest + CALL_END + behind
            self._may_be_head = head is None and len(body) < MAX_HEAD_CHARS
        if behind is not None:
            self._finish_odd_call("".join(self._held), closed=True)
            self._enter(_State.CONTENT)
        return behind

    def _finish_odd_call(self, body: str, *, closed: bool) -> None:
        """A call that is not written in the usual order; if it is no call at all, it is content."""
        call = _parse_call(body)
        if call is None:
            self._skip_space = False
            self._emit(self._content, CALL + body + (CALL_END if closed else ""))
            return
        name, arguments = call
        self._begin_call(name)
        self._add_arguments(arguments)

    def _begin_call(self, name: str) -> None:
        self._calls.append(ToolCallDelta(self.num_calls, name, ""))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        """One delta has at most one piece of a call."""
        index, name = self.num_calls - 1, None
        if self._calls and self._calls[-1].index == index:
            last = self._calls.pop()
            name, text = last.name, last.arguments + text
        self._calls.append(ToolCallDelta(index, name, text))

    def _call_arguments(self, text: str) -> str | None:
        end = self._scanner.scan(text)
        piece = text if end is None else text[:end]
        if piece:
            self._add_arguments(piece)
        if end is None:
            return None
        self._enter(_State.CALL_TAIL)
        return text[end:]


class _TagSearch:
    """Finds the first occurrence of a tag in a text that comes in pieces."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self.held = ""
        """The end of the text so far, if the tag may begin there."""

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
