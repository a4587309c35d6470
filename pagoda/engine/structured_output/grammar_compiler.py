# SPDX-License-Identifier: Apache-2.0
"""Compiles a grammar, or says in one sentence what is wrong with it.

llguidance compiles: https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from pagoda.engine.structured_output.constraint import CompiledGrammar
from pagoda.engine.structured_output.vocabulary import Vocabulary
from pagoda.messages.frontend import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_LEXER_STATES = 50_000
"""States of the lexer of one grammar, which all of its answers share; up to a kilobyte each."""
RENEWAL_LIMIT_S = 0.01
"""Processor time of compiling up to which a grammar is compiled again on the engine's loop."""
NAMES = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "lark": "the grammar",
}
"""The word for a grammar of each kind in errors."""
_MAX_ERROR_CHARS = 300
_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(?P<names>.*)\]")
_TOO_LARGE = re.compile(r"too big|too large|too many items|too complex", re.IGNORECASE)


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar | str:
    """Returns the grammar, or what is wrong with it in one sentence."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        match grammar.kind:
            case "json_schema":
                source = LLMatcher.grammar_from_json_schema(grammar.text)
            case "regex":
                source = LLMatcher.grammar_from_regex(grammar.text)
            case "lark":
                source = LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        return _sentence(grammar, str(error))
    # Some ten milliseconds to begin, and a few at most for each token. Where all letters of Unicode are tokens,
    # `\w` alone takes most of a token's fuel.
    limits = LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=60_000,
        step_max_items=20_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=200_000,
        verbose_errors=False,
    )

    def compile_again() -> LLMatcher:
        return LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)

    began = time.thread_time()
    matcher = compile_again()
    is_quick = time.thread_time() - began <= RENEWAL_LIMIT_S
    if matcher.is_error() or not matcher.compute_bitmask() or matcher.is_error():
        return _sentence(grammar, matcher.get_error())
    compiled = CompiledGrammar(
        matcher, vocabulary, compile_again=compile_again if is_quick else None
    )
    if not compiled.try_out():
        return (
            f"{NAMES[grammar.kind]} is too large or too complex to be followed within the limits."
        )
    return compiled


def _sentence(grammar: Grammar, error: str) -> str:
    """The error of llguidance as one sentence, with line and column of a grammar in Lark's syntax."""
    name = NAMES[grammar.kind]
    unknown = _UNKNOWN_KEYWORDS.search(error)
    if unknown is not None:
        names = unknown["names"].replace('"', "")
        return f"the JSON schema has keywords that are not supported: {names}."
    if "coerce_one_of" in error:
        rule = "has oneOf with schemas of which more than one may hold; anyOf can be held instead"
        return f"the JSON schema {rule}."
    if _TOO_LARGE.search(error):
        return f"{name} is too large or too complex to be compiled within the limits."
    if "NoExtension" in error:
        return f"{name} allows no answer."
    place = _PLACE.match(error)
    if place is not None:
        error = error[place.end() :]
        if grammar.kind == "lark":
            name = f"{name} is wrong at line {place['line']}, column {place['column']}"
    lines = error.replace("<non-verbose/>", "").strip().splitlines()
    reason = lines[0].strip() if lines else "it cannot be compiled"
    for line in lines[1:]:  # the parser of regular expressions draws a picture first
        if line.startswith("error: "):
            reason = line.removeprefix("error: ")
    if len(reason) > _MAX_ERROR_CHARS:
        reason = f"{reason[:_MAX_ERROR_CHARS]}…"
    return f"{name}: {reason.removesuffix('.')}."
