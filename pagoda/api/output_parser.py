"""What a model writes, taken apart: its reasoning, its tool calls, and the answer itself.

Reasoning stands between `<think>` tags at the beginning. A tool call stands between `<tool_call>` tags as
`{"name": ..., "arguments": {...}}` (Hermes, Qwen). The parser is fed with text deltas and gives back deltas, so
that streams and whole answers are made by the same code; text is held back only while it could be part of a tag,
or white space that a tag would swallow.
"""

from __future__ import annotations

import enum
import json
import re

import msgspec

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

_CALL_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
)


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of one tool call. The first piece has the name; the others add to `arguments`."""

    index: int
    name: str | None
    arguments: str


class AnswerDelta(msgspec.Struct, frozen=True):
    """What a text delta adds to the parts of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class _State(enum.Enum):
    BEGIN = enum.auto()
    """Before anything but white space; reasoning may begin."""
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL_HEAD = enum.auto()
    CALL_ARGUMENTS = enum.auto()
    CALL_TAIL = enum.auto()
    """Behind a call's arguments, before its closing tag."""


class OutputParser:
    """Takes one answer apart as it grows."""

    def __init__(
        self, *, thinks: bool = False, in_reasoning: bool = False, calls_tools: bool = False
    ) -> None:
        """`thinks`: reasoning may come first. `in_reasoning`: the prompt has already opened it."""
        self._state = _State.CONTENT
        if in_reasoning:
            self._state = _State.REASONING
        elif thinks:
            self._state = _State.BEGIN
        self._calls_tools = calls_tools
        self._buffer = ""
        self._skip_space = in_reasoning
        self._num_calls = 0
        self._scanner = _ObjectScanner()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []

    @property
    def num_calls(self) -> int:
        """Tool calls seen so far."""
        return self._num_calls

    @property
    def one_call_complete(self) -> bool:
        return self._num_calls > 1 or (
            self._num_calls == 1 and self._state is not _State.CALL_ARGUMENTS
        )

    @property
    def transparent(self) -> bool:
        """All further text is content, so it need not be fed to the parser."""
        return self._state is _State.CONTENT and not (
            self._calls_tools or self._skip_space or self._buffer
        )

    def push(self, text: str) -> AnswerDelta:
        """What `text` adds."""
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def flush(self) -> AnswerDelta:
        """What was held back, once no more text follows."""
        text, self._buffer = self._buffer, ""
        match self._state:
            case _State.BEGIN | _State.CONTENT:
                self._emit(self._content, text)
            case _State.REASONING:
                self._emit(self._reasoning, text.rstrip())
            case _State.CALL_HEAD:
                self._finish_odd_call(text, closed=False)
            case _State.CALL_ARGUMENTS | _State.CALL_TAIL:
                pass
        return self._take()

    def _take(self) -> AnswerDelta:
        delta = AnswerDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return delta

    def _step(self) -> bool:
        """Moves on by one state, if the buffer has all that it takes."""
        match self._state:
            case _State.BEGIN:
                return self._begin()
            case _State.REASONING:
                return self._until(THINK_END, self._reasoning, _State.CONTENT)
            case _State.CONTENT if self._calls_tools:
                return self._until(CALL, self._content, _State.CALL_HEAD)
            case _State.CONTENT:
                text, self._buffer = self._buffer, ""
                self._emit(self._content, text)
                return False
            case _State.CALL_HEAD:
                return self._call_head()
            case _State.CALL_ARGUMENTS:
                return self._call_arguments()
            case _State.CALL_TAIL:
                return self._call_tail()

    def _begin(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK):
            self._buffer = text[len(THINK) :]
            self._enter(_State.REASONING)
            return True
        if THINK.startswith(text):
            return False
        self._state = _State.CONTENT
        return True

    def _until(self, tag: str, part: list[str], following: _State) -> bool:
        """Emits text up to `tag`, without the white space around it."""
        before, found, behind = self._buffer.partition(tag)
        if found:
            self._emit(part, before.rstrip())
            self._buffer = behind
            self._enter(following)
            return True
        certain = len(self._buffer) - _overlap(self._buffer, tag)
        certain = len(self._buffer[:certain].rstrip())
        self._emit(part, self._buffer[:certain])
        self._buffer = self._buffer[certain:]
        return False

    def _emit(self, part: list[str], text: str) -> None:
        if self._skip_space:
            text = text.lstrip()
            self._skip_space = not text
        if text:
            part.append(text)

    def _enter(self, state: _State) -> None:
        self._state = state
        self._skip_space = True

    def _call_head(self) -> bool:
        head = _CALL_HEAD.match(self._buffer)
        if head is not None:
            self._begin_call(json.loads(head.group(1), strict=False))
            self._buffer = self._buffer[head.end() :]
            self._scanner = _ObjectScanner()
            self._state = _State.CALL_ARGUMENTS
            return True
        body, closed, behind = self._buffer.partition(CALL_END)
        if not closed:
            return False
        self._finish_odd_call(body, closed=True)
        self._buffer = behind
        self._enter(_State.CONTENT)
        return True

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
        self._calls.append(ToolCallDelta(self._num_calls, name, ""))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        """One delta has at most one piece of a call."""
        index, name = self._num_calls - 1, None
        if self._calls and self._calls[-1].index == index:
            last = self._calls.pop()
            name, text = last.name, last.arguments + text
        self._calls.append(ToolCallDelta(index, name, text))

    def _call_arguments(self) -> bool:
        end = self._scanner.scan(self._buffer)
        piece = self._buffer if end is None else self._buffer[:end]
        if piece:
            self._add_arguments(piece)
        self._buffer = self._buffer[len(piece) :]
        if end is None:
            return False
        self._state = _State.CALL_TAIL
        return True

    def _call_tail(self) -> bool:
        _, closed, behind = self._buffer.partition(CALL_END)
        if not closed:
            return False
        self._buffer = behind
        self._enter(_State.CONTENT)
        return True


class _ObjectScanner:
    """Finds the end of a JSON object in a text that comes in pieces."""

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


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that begins `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
