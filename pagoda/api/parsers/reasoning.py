"""Reasoning before an answer, between tags."""

from __future__ import annotations

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.api.parsers.source import Steps, Tags, TextSource
from pagoda.frontend.answer_formats import ReasoningFormat


def read_reasoning(
    source: TextSource, answer: AnswerBuilder, style: ReasoningFormat, *, is_open: bool
) -> Steps[None]:
    """Reads the reasoning, if the text begins with any. `is_open`: its opening tag is behind us."""
    taken = yield from source.spaces()
    begins = False
    for tag in style.begin:
        begins = begins or (yield from source.accept(tag))
    if not begins:
        source.put_back(taken)
        if not is_open:
            return
    answer.in_reasoning = True
    answer.end_part()
    if (yield from source.until(Tags(*style.end), answer.add_reasoning)) is not None:
        answer.in_reasoning = False
        answer.end_part()
