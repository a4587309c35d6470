# SPDX-License-Identifier: Apache-2.0
"""The output parser: parts a model's output into reasoning, tool calls and the answer itself.

The parser takes text deltas and returns deltas, so that streams and whole answers are made by the same code. Text
is held back only while it could be part of a tag, or white space that a tag would swallow. Work is linear in the
text, however the text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pagoda.api.parsers.bare_calls import read_bare
from pagoda.api.parsers.deltas import AnswerBuilder, AnswerDelta, ToolCallDelta
from pagoda.api.parsers.harmony import read_harmony
from pagoda.api.parsers.json_calls import (
    DEEPSEEK,
    KIMI_K2,
    read_granite,
    read_mistral,
    read_phi4_mini,
)
from pagoda.api.parsers.reasoning import read_reasoning
from pagoda.api.parsers.schemas import ToolSchemas
from pagoda.api.parsers.xml_calls import read_glm45, read_hermes, read_qwen3_coder
from pagoda.text.answer_formats import HARMONY, ToolFormatName
from pagoda.text.reasoning_border import ReasoningBorder
from pagoda.text.text_source import Steps, TextSource

__all__ = ["AnswerDelta", "OutputParser", "ToolCallDelta"]


@dataclass(frozen=True)
class ToolReader:
    """A reader of content with tool calls."""

    read: Callable[[TextSource, AnswerBuilder, ToolSchemas], Steps[None]]
    openings: tuple[str, ...]
    """Tags with which calls begin."""


_HERMES_OPENINGS = ("<tool_call>",)
_BARE = ToolReader(read_bare, ("<|python_tag|>", "<|python_start|>"))
_DEEPSEEK = ToolReader(DEEPSEEK.read, ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"))
READERS: Mapping[ToolFormatName, ToolReader] = MappingProxyType(
    {
        "hermes": ToolReader(read_hermes, _HERMES_OPENINGS),
        "qwen3_coder": ToolReader(read_qwen3_coder, (*_HERMES_OPENINGS, "<function=")),
        "llama3_json": _BARE,
        "pythonic": _BARE,
        "mistral": ToolReader(read_mistral, ("[TOOL_CALLS]",)),
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v31": _DEEPSEEK,
        "kimi_k2": ToolReader(
            KIMI_K2.read,
            (
                *("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
                "<|tool_call_begin|>",
            ),
        ),
        "glm45": ToolReader(read_glm45, _HERMES_OPENINGS),
        "granite": ToolReader(read_granite, ("<|tool_call|>", *_HERMES_OPENINGS)),
        "phi4_mini_json": ToolReader(read_phi4_mini, ("functools[", "<|tool_call|>")),
        "bare_list": _BARE,
    }
)
"""Readers by format; `openai` is read as a whole by `read_harmony`."""


class OutputParser:
    """Parses one answer as it grows."""

    def __init__(
        self,
        *,
        tool_format: ToolFormatName | None = None,
        reasoning: ReasoningBorder | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`tool_format`: None if the answer cannot have calls. `reasoning`: None if reasoning is content.
        `tools` are those that the model was offered."""
        self._source = TextSource()
        self._answer = AnswerBuilder()
        self._is_plain = False
        """All further text is content, but for white space behind a tag."""
        self._steps = self._parse(tool_format, reasoning, ToolSchemas(tools))
        next(self._steps)

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    @property
    def one_call_complete(self) -> bool:
        return self.num_calls > self._answer.in_arguments

    @property
    def in_reasoning(self) -> bool:
        return self._answer.in_reasoning

    @property
    def transparent(self) -> bool:
        """All further text is content, so the parser need not see it."""
        return self._is_plain and not self._answer.holds_space

    def push(self, text: str) -> AnswerDelta:
        if self.transparent:
            return AnswerDelta(text)
        if text:
            self._source.feed(text)
            next(self._steps)
        return self._answer.drain()

    def flush(self, *, is_cut: bool = False) -> AnswerDelta:
        """The parts that were held back, once no more text follows. `is_cut`: the model would have gone on."""
        self._source.end(is_cut=is_cut)
        with suppress(StopIteration):
            next(self._steps)
        self._answer.release_space()
        return self._answer.drain()

    def _parse(
        self,
        tool_format: ToolFormatName | None,
        reasoning: ReasoningBorder | None,
        tools: ToolSchemas,
    ) -> Steps[None]:
        source, answer = self._source, self._answer
        reader = None if tool_format is None else READERS.get(tool_format)
        if tool_format == "openai" or (reasoning is not None and reasoning.style is HARMONY):
            yield from read_harmony(source, answer, None if tool_format is None else tools)
        elif reasoning is not None:
            openings = () if reader is None else reader.openings
            yield from read_reasoning(source, answer, reasoning, openings)
        if reader is not None:
            yield from reader.read(source, answer, tools)
        # What a reader leaves behind is content.
        self._is_plain = True
        answer.release_space()
        while text := (yield from source.take_some()):
            answer.pass_content(text)
