# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from counted_text import assert_linear_copies
from hypothesis import given
from hypothesis import strategies as st

from pagoda.text.answer_formats import HARMONY, THINK, ParserChoice
from pagoda.text.reasoning_border import BorderFinder, ReasoningBorder

GRANITE = ParserChoice(reasoning="granite").formats("").reasoning
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def counted(deltas: list[str], border: ReasoningBorder) -> str:
    """The text with what stop strings count in between brackets."""
    finder = BorderFinder(border)
    parts = [part for delta in deltas for part in finder.push(delta)] + finder.flush()
    runs = itertools.groupby(parts, key=lambda part: part[1])
    texts = (("".join(text for text, _ in run), counts) for counts, run in runs)
    return "".join(f"[{text}]" if counts else text for text, counts in texts)


@pytest.mark.parametrize(
    ("style", "is_open", "text"),
    [
        (THINK, False, "<think>a</think>\n\n[b\n<think>c]"),
        (THINK, False, "\n<think>a</thi"),
        (THINK, False, "[\n <thin]"),
        (THINK, False, "[b</think>c]"),
        (THINK, True, "a</think> [b]"),
        (THINK, True, "<think>a</think>[b]"),
        (GRANITE, False, "Here's my thought process: a Here is my response: [b]"),
        (HARMONY, False, f"<|channel|>analysis<|message|>a<|end|>{FINAL}[b]<|return|>"),
        (
            HARMONY,
            False,
            f"<|channel|>analysis<|message|>a<|channel|>commentary<|message|>[b]<|end|>{FINAL}[c]",
        ),
        (HARMONY, False, "<|channel|>analysis to=f<|message|>[{}]<|call|>"),
        (HARMONY, False, "[no message]"),
        (HARMONY, False, "<|channel|>fina"),
    ],
)
def test_stop_strings_count_outside_of_reasoning(style, is_open: bool, text: str) -> None:
    border = ReasoningBorder(style, is_open)
    said = text.replace("[", "").replace("]", "")
    for deltas in ([said], list(said), [said[:5], said[5:]]):
        assert counted(deltas, border) == text


PIECES = (
    "<think>",
    "</think>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "analysis",
    " ",
    "a",
)


@given(
    st.lists(st.sampled_from(PIECES), max_size=9).map("".join),
    st.sampled_from([THINK, HARMONY]),
    st.booleans(),
    st.integers(0, 99),
)
def test_all_text_is_told_once_however_it_is_cut(text: str, style, is_open: bool, at: int) -> None:
    border = ReasoningBorder(style, is_open)
    whole = counted([text], border)
    assert whole.replace("[", "").replace("]", "") == text
    assert counted(list(text), border) == whole
    assert counted([text[:at], text[at:]], border) == whole


@pytest.mark.parametrize(
    ("prompt", "prefill", "is_open"),
    [
        ("<user>?<assistant>", "", False),
        ("<user>?<assistant><think>\n", "", True),
        ("<user>?<assistant><think>\n\n</think>\n\n", "", False),
        ("<user><think>?<assistant>", "", False),
        ("<assistant><think>I", "<think>I", True),
        ("<assistant><think>\nI", "I", True),
        ("<assistant><think>I</think>so", "<think>I</think>so", False),
        ("<assistant>so", "so", False),
    ],
)
def test_a_prompt_opens_reasoning_or_not(prompt: str, prefill: str, is_open: bool) -> None:
    assert ReasoningBorder.behind(THINK, prompt, prefill).is_open is is_open


def test_answers_of_r1_are_open_unless_the_prompt_says_otherwise() -> None:
    style = ParserChoice(reasoning="deepseek_r1").formats("").reasoning
    assert style is not None
    for prompt, prefill, is_open in (
        ("?", "", True),
        ("?</think>", "", False),
        ("so", "so", False),
    ):
        assert ReasoningBorder.behind(style, prompt, prefill).is_open is is_open


@pytest.mark.parametrize("begin", ["", "<think>", "<think>a</think>"])
@pytest.mark.parametrize("more", [" ", "a", "</thin", "<think>"])
def test_work_is_linear_in_the_text(begin: str, more: str) -> None:
    def feed(pieces: Iterable[str]) -> None:
        finder = BorderFinder(ReasoningBorder(THINK, is_open=False))
        finder.push(begin)
        for piece in pieces:
            finder.push(piece)
        finder.flush()

    assert_linear_copies(feed, more * (2000 // len(more)))
