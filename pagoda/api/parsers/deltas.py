# SPDX-License-Identifier: Apache-2.0
"""The parts of an answer, as a parser puts them together from text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


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


def delta_without_reasoning(delta: AnswerDelta) -> AnswerDelta:
    return msgspec.structs.replace(delta, reasoning="") if delta.reasoning else delta


class AnswerBuilder:
    """Collects the parts of an answer between two deltas.

    White space at the end of a part is held back until other text follows it. A tag of reasoning swallows the
    white space around itself; a call does so at the beginning and at the end of the content, not between texts.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.in_reasoning = False
        self.in_arguments = False
        self.skips_space = False
        """White space is dropped until other text comes: a tag was before it."""
        self._has_content = self._has_reasoning = False
        self._separator = ""
        """Text between two messages of one kind, if both have text."""
        self._is_behind_call = False
        """White space that is held back is that around calls."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._space: list[str] = []
        """White space at the end of the part that grows."""

    def add_content(self, text: str) -> None:
        """Adds text that is no call: content, or reasoning that never ends and has calls in it."""
        self._add(self._reasoning if self.in_reasoning else self._content, text)

    def add_reasoning(self, text: str) -> None:
        self._add(self._reasoning, text)

    def end_part(self, separator: str = "") -> None:
        """Notes a tag, which ends a part and swallows the white space around itself. `separator` stands between
        the part and the next, if that is of the same kind."""
        self._space.clear()
        self.skips_space = True
        self._separator = separator

    def pass_content(self, text: str) -> None:
        """Adds content behind which no tag can come, so that its white space is certain."""
        if self.skips_space:
            text = text.lstrip()
            self.skips_space = not text
        if text:
            self._content += [*self._space, text]
            self._space.clear()

    @property
    def holds_space(self) -> bool:
        """True if what comes next decides whether white space is part of the content."""
        return self.skips_space or bool(self._space)

    def release_space(self) -> None:
        """Notes that no tag follows: white space at the end of content is content."""
        if not self.in_reasoning and not self._is_behind_call:
            self._content += self._space
        self._space.clear()

    def begin_call(self, name: str) -> None:
        self._is_behind_call = True
        if not (self._has_content or self._has_reasoning):
            self.end_part()
        self.num_calls += 1
        self.in_arguments = True
        self._add_piece(name, "")

    def add_arguments(self, text: str) -> None:
        """Adds to the JSON text of the last call's arguments."""
        if text:
            self._add_piece(None, text)

    def end_call(self) -> None:
        self.in_arguments = False

    def drain(self) -> AnswerDelta:
        """The parts since the last call of this function."""
        delta = AnswerDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        for parts in (self._content, self._reasoning, self._calls):
            parts.clear()
        return delta

    def _add(self, part: list[str], text: str) -> None:
        if self.skips_space:
            text = text.lstrip()
            self.skips_space = not text
        solid = text.rstrip()
        if solid:
            if self._has_content if part is self._content else self._has_reasoning:
                part.append(self._separator)
            part += (*self._space, solid)
            self._space.clear()
            self._separator = ""
            self._is_behind_call = False
            self._has_content = self._has_content or part is self._content
            self._has_reasoning = self._has_reasoning or part is self._reasoning
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def _add_piece(self, name: str | None, arguments: str) -> None:
        """A name begins the next call; None adds to the last one. One delta has at most one piece of a call."""
        index = self.num_calls - 1
        if self._calls and self._calls[-1].index == index:
            last = self._calls.pop()
            name, arguments = last.name, last.arguments + arguments
        self._calls.append(ToolCallDelta(index, name, arguments))
