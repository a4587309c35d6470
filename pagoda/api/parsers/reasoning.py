# SPDX-License-Identifier: Apache-2.0
"""Reasoning before an answer, between tags."""

from __future__ import annotations

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.text.reasoning_border import ReasoningBorder
from pagoda.text.text_source import Steps, Tags, TextSource


def read_reasoning(
    source: TextSource, answer: AnswerBuilder, border: ReasoningBorder, openings: tuple[str, ...]
) -> Steps[None]:
    """Reads the reasoning, if the text begins with any.

    Models call tools without having ended their reasoning. Whether a call in it is one or a draft shows where the
    text ends. So from the first of `openings`, the tags of calls, on, text is held back, and is left unread if the
    model ends its answer there, still in reasoning.
    """
    answer.in_reasoning = border.is_open
    if not (yield from border.begin(source)):
        return
    answer.in_reasoning = True
    answer.end_part()
    ends = border.style.end
    tag = yield from source.until(Tags(*ends, *openings), answer.add_reasoning)
    held: list[str] = []
    if tag in openings:
        held.append(tag)
        tag = yield from source.until(Tags(*ends), held.append)
    if held and tag is None and not source.is_cut:
        source.put_back("".join(held))
        return
    answer.add_reasoning("".join(held))
    if tag is not None:
        answer.in_reasoning = False
        answer.end_part()
