# SPDX-License-Identifier: Apache-2.0
"""The border between the reasoning of an answer and what is behind it.

Parsers, grammars and stop strings all go by it: reasoning is no content, grammars hold what is behind it, and stop
strings count there.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from pagoda.text.answer_formats import HARMONY, ReasoningFormat
from pagoda.text.text_source import Steps, Tags, TextSource

_START, _CHANNEL = "<|start|>", "<|channel|>"
_MESSAGE = "<|message|>"
_HEADERS = Tags(_START, _CHANNEL)
HARMONY_HEADER_END = Tags(_MESSAGE, _START, "<|end|>")
HARMONY_BODY_ENDS = Tags(_START, _CHANNEL, "<|end|>", "<|call|>", "<|return|>")
MAX_HARMONY_HEADER_CHARS = 1024


@dataclass(frozen=True)
class ReasoningBorder:
    """The reasoning that one answer may have."""

    style: ReasoningFormat
    is_open: bool
    """The answer begins within it."""

    @staticmethod
    def behind(style: ReasoningFormat, prompt: str, prefill: str = "") -> ReasoningBorder:
        """The border of an answer to `prompt`, which ends with `prefill`, the beginning of the answer."""
        prefill = prefill.strip()
        text = prompt.rstrip()
        if prefill:
            begins = prefill.startswith(style.begin) or (
                text.removesuffix(prefill).rstrip().endswith(style.begin)
            )
            return ReasoningBorder(style, begins and not any(end in prefill for end in style.end))
        is_open = text.endswith(style.begin) or (style.is_open and not text.endswith(style.end))
        return ReasoningBorder(style, is_open)

    def begin(self, source: TextSource) -> Steps[bool]:
        """Takes the tag at the beginning of a text. Returns False if the text does not begin within reasoning."""
        space = yield from source.spaces()
        for tag in self.style.begin:
            if (yield from source.accept(tag)):
                return True
        source.put_back(space)
        return self.is_open

    def names_a_tag(self, text: str) -> bool:
        """True if `text` has a tag of reasoning in it."""
        return any(tag in text for tag in self.style.begin + self.style.end)


class BorderFinder:
    """Tells the text of an answer in which stop strings count from its reasoning and the tags around that."""

    def __init__(self, border: ReasoningBorder) -> None:
        self._source = TextSource()
        self._untold: list[str] = []
        """Text of which is not told yet what it is."""
        self._num_told = 0
        self._parts: list[tuple[str, bool]] = []
        self._steps = self._messages() if border.style is HARMONY else self._tagged(border)
        next(self._steps)

    def push(self, text: str) -> list[tuple[str, bool]]:
        """The parts of the text that are certain now; True with those in which stop strings count."""
        self._untold.append(text)
        self._source.feed(text)
        next(self._steps)
        return self._drain()

    def flush(self) -> list[tuple[str, bool]]:
        """The parts that were held back, once no more text follows."""
        self._source.end()
        with suppress(StopIteration):
            next(self._steps)
        self._tell(counts=False)
        return self._drain()

    def _drain(self) -> list[tuple[str, bool]]:
        parts, self._parts = self._parts, []
        return parts

    def _tell(self, *, counts: bool) -> None:
        """Tells what the text is that has been read by now."""
        length = self._source.num_read - self._num_told
        if length:
            untold = "".join(self._untold)
            self._parts.append((untold[:length], counts))
            self._untold = [untold[length:]]
            self._num_told += length

    def _inside(self, text: str) -> None:
        del text
        self._tell(counts=False)

    def _outside(self, text: str) -> None:
        del text
        self._tell(counts=True)

    def _tagged(self, border: ReasoningBorder) -> Steps[None]:
        source = self._source
        if (yield from border.begin(source)):
            yield from source.until(Tags(*border.style.end), self._inside)
            yield from source.spaces()  # they belong to the tag
            self._tell(counts=False)
        while text := (yield from source.take_some()):
            self._outside(text)

    def _messages(self) -> Steps[None]:
        source = self._source
        tag: str | None = None
        while True:
            if tag not in (_START, _CHANNEL):
                tag = yield from source.until(_HEADERS, self._outside)
            header, end = yield from source.collect(
                HARMONY_HEADER_END, limit=MAX_HARMONY_HEADER_CHARS
            )
            self._tell(counts=False)
            if end != _MESSAGE:
                if end is None and source.ended:
                    return
                tag = end
                continue
            is_reasoning = "analysis" in header and "to=" not in header
            emit = self._inside if is_reasoning else self._outside
            tag = yield from source.until(HARMONY_BODY_ENDS, emit)
            self._tell(counts=False)
            if tag is None:
                return
