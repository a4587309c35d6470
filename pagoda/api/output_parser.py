"""A parser of a model's output: reasoning, tool calls, and the answer itself.

The parser takes text deltas and returns deltas, so that streams and whole answers are made by the same code. Text
is held back only while it could be part of a tag, or white space that a tag would swallow. Work is linear in the
text, however the text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from pagoda.api.parsers.deltas import AnswerBuilder, AnswerDelta, ToolCallDelta
from pagoda.api.parsers.harmony import read_harmony
from pagoda.api.parsers.json_calls import (
    DEEPSEEK,
    KIMI_K2,
    read_bare_list,
    read_granite,
    read_hermes,
    read_llama3_json,
    read_mistral,
    read_phi4_mini,
)
from pagoda.api.parsers.pythonic import read_pythonic
from pagoda.api.parsers.reasoning import read_reasoning
from pagoda.api.parsers.schemas import ToolSchemas
from pagoda.api.parsers.source import Steps, TextSource
from pagoda.api.parsers.xml_calls import read_glm45, read_qwen3_coder
from pagoda.frontend.answer_formats import HARMONY, ReasoningFormat, ToolFormatName

__all__ = ["AnswerDelta", "OutputParser", "ToolCallDelta"]

ToolReader = Callable[[TextSource, AnswerBuilder, ToolSchemas], Steps[None]]

READERS: Mapping[ToolFormatName, ToolReader] = MappingProxyType(
    {
        "hermes": read_hermes,
        "qwen3_coder": read_qwen3_coder,
        "llama3_json": read_llama3_json,
        "pythonic": read_pythonic,
        "mistral": read_mistral,
        "deepseek_v3": DEEPSEEK.read,
        "deepseek_v31": DEEPSEEK.read,
        "kimi_k2": KIMI_K2.read,
        "glm45": read_glm45,
        "granite": read_granite,
        "phi4_mini_json": read_phi4_mini,
        "bare_list": read_bare_list,
    }
)
"""Readers of content with tool calls; `openai` is read as a whole by `read_harmony`."""


class OutputParser:
    """Parses one answer as it grows."""

    def __init__(
        self,
        *,
        tool_format: ToolFormatName | None = None,
        reasoning_format: ReasoningFormat | None = None,
        in_reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`tool_format`: None if the answer cannot have calls. `reasoning_format`: None if reasoning is content.
        `in_reasoning`: the prompt has already opened it. `tools` are those that the model was offered."""
        self._source = TextSource()
        self._answer = AnswerBuilder()
        self._is_plain = False
        """All further text is content, but for white space behind a tag."""
        self._in_reasoning = in_reasoning
        self._steps = self._parse(tool_format, reasoning_format, ToolSchemas(tools))
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
        return self._is_plain and not self._answer.skips_space

    def push(self, text: str) -> AnswerDelta:
        if self.transparent:
            return AnswerDelta(text)
        if text:
            self._source.feed(text)
            next(self._steps)
        return self._answer.drain()

    def flush(self) -> AnswerDelta:
        """The parts that were held back, once no more text follows."""
        self._source.ended = True
        with suppress(StopIteration):
            next(self._steps)
        self._answer.release_space()
        return self._answer.drain()

    def _parse(
        self,
        tool_format: ToolFormatName | None,
        reasoning_format: ReasoningFormat | None,
        tools: ToolSchemas,
    ) -> Steps[None]:
        source, answer = self._source, self._answer
        if reasoning_format is HARMONY or tool_format == "openai":
            yield from read_harmony(source, answer, calls_tools=tool_format is not None)
        elif reasoning_format is not None:
            answer.in_reasoning = self._in_reasoning
            yield from read_reasoning(source, answer, reasoning_format, is_open=self._in_reasoning)
        if tool_format is not None and tool_format != "openai":
            yield from READERS[tool_format](source, answer, tools)
        # What a reader leaves behind is content.
        self._is_plain = True
        answer.release_space()
        while text := (yield from source.take_some()):
            answer.pass_content(text)
