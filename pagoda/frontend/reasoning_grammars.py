"""Grammars behind reasoning, which is free, perhaps within a budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pagoda.errors import refuse
from pagoda.frontend.answer_formats import HARMONY, AnswerFormats, ReasoningFormat
from pagoda.frontend.lark import GAP, LarkWriter
from pagoda.messages.frontend import Grammar

HARMONY_FINAL = "<|channel|>final<|message|>"
_HARMONY_END = "<|end|><|start|>assistant"
_LARK_TOKENS = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*|(?P<start>\bstart\b)'
)
"""Strings, regular expressions and comments, in which the name of the first rule means nothing; and that name."""


@dataclass(frozen=True)
class Reasoning:
    """Reasoning in front of an answer."""

    style: ReasoningFormat
    is_open: bool
    """The prompt has opened it."""
    max_tokens: int | None = None
    """Tokens after which it ends; the tag behind it must be a token then."""


def behind_reasoning(
    grammar: Grammar,
    added_token_id: Callable[[str], int | None],
    formats: AnswerFormats,
    reasoning: Reasoning,
) -> Grammar:
    """The grammar of answers that reason first and then are in `grammar`.
    Raises InvalidRequestError: the reasoning cannot be held to its budget."""
    writer = LarkWriter(added_token_id, formats.tokens(calls_tools=False))
    if reasoning.style is HARMONY:
        begin = f"{harmony_prefix(writer, reasoning.max_tokens)} {writer.literal(HARMONY_FINAL)}"
    else:
        begin = reasoning_prefix(writer, reasoning)
    if grammar.kind == "json_schema":
        return Grammar("lark", writer.grammar(f"{begin} {writer.rule(f'%json {grammar.text}')}"))
    if grammar.kind == "regex":
        regex = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", grammar.text, flags=re.DOTALL)
        body = writer.terminal(f"/{regex}/".replace("\n", r"\n"))
        return Grammar("lark", writer.grammar(f"{begin} {body}"))
    renamed = _LARK_TOKENS.sub(
        lambda found: "held_answer" if found["start"] else found[0], grammar.text
    )
    return Grammar("lark", f"{writer.grammar(f'{begin} held_answer')}\n{renamed}\n")


def reasoning_prefix(writer: LarkWriter, reasoning: Reasoning) -> str:
    """An expression for the reasoning and a little white space behind it. Raises: as `behind_reasoning`."""
    style = reasoning.style
    _check_budget(writer, reasoning.max_tokens, style.end[0])
    opening = writer.literal(style.begin[0])
    body = writer.until(style.end[0], max_tokens=reasoning.max_tokens)
    if not reasoning.is_open:
        return f"({opening} {body} {GAP})?"
    again = f"({opening})? " if writer.is_token(style.begin[0]) else ""
    return f"{again}{body} {GAP}"


def harmony_prefix(writer: LarkWriter, max_tokens: int | None) -> str:
    """An expression for reasoning and a preamble, the first messages. Raises: as `behind_reasoning`."""
    _check_budget(writer, max_tokens, "<|end|>")
    analysis = writer.literal("<|channel|>analysis<|message|>")
    preamble = writer.literal("<|channel|>commentary<|message|>")
    thinks = f"({analysis} {writer.until(_HARMONY_END, max_tokens=max_tokens)})?"
    return f"{thinks} ({preamble} {writer.until(_HARMONY_END)})?"


def _check_budget(writer: LarkWriter, max_tokens: int | None, end: str) -> None:
    if max_tokens is not None and not writer.is_token(end):
        rule = f"needs a model with a token for the end of its reasoning; {end!r} is none here"
        refuse("thinking_token_budget", rule, "not_supported")
