# SPDX-License-Identifier: Apache-2.0
"""Fill in the middle (Bavarian et al. 2022): the prompt for what belongs between two texts.

Models that were trained for it have tokens for it, which their vocabulary shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.errors import refuse
from pagoda.text.text_generator import TextGenerator
from pagoda.text.tokenizers.tokenizer import Tokenizer

_PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StableCode
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
)
_SUFFIX_FIRST = (
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # CodeGeeX 4
)
"""Tokens before the text in front of the gap, before the text behind it, and before what fills it, where there is
such a token; by the order in which the texts come."""
_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|file_sep|>", "<file_sep>"),
    *("<|repo_name|>", "<|file_separator|>", "▁<EOT>", "<EOT>"),
)
"""Tokens behind what fills a gap, besides those that end any answer."""


@dataclass(frozen=True)
class InfillMarks:
    """The tokens of a model for filling in the middle."""

    prefix: int
    suffix: int
    middle: int | None
    is_suffix_first: bool
    ends: tuple[int, ...]
    """Tokens that end what fills the gap."""


def marks_of(tokenizer: Tokenizer) -> InfillMarks | None:
    """None for a model that was not trained for it."""
    ends = tuple(token_id for it in _ENDS if (token_id := tokenizer.token_id(it)) is not None)
    for families in (_PREFIX_FIRST, _SUFFIX_FIRST):
        found = known_tokens(tokenizer, families)
        if found is not None:
            prefix, suffix, *middle = found
            is_suffix_first = families is _SUFFIX_FIRST
            return InfillMarks(prefix, suffix, next(iter(middle), None), is_suffix_first, ends)
    return None


def require_marks(tokenizer: Tokenizer, param: str) -> InfillMarks:
    """Raises InvalidRequestError: the model was not trained for filling in the middle, which `param` asks for."""
    marks = marks_of(tokenizer)
    if marks is None:
        refuse(param, "is not supported by this model: it has no tokens for it", "not_supported")
    return marks


def known_tokens(tokenizer: Tokenizer, families: Sequence[Sequence[str]]) -> list[int] | None:
    """The ids of the first family whose tokens are all in the vocabulary."""
    for family in families:
        ids = [tokenizer.token_id(token) for token in family]
        known = [token_id for token_id in ids if token_id is not None]
        if len(known) == len(family):
            return known
    return None


async def infill_prompt(
    generator: TextGenerator,
    marks: InfillMarks,
    before: Sequence[int],
    behind: Sequence[int],
    extra: Sequence[int] = (),
) -> list[int]:
    """The tokens of a prompt. `before` and `behind` are those around the gap, `extra` those in front of them."""
    parts = [[marks.prefix, *before], [marks.suffix, *behind]]
    if marks.is_suffix_first:
        parts.reverse()
    begin = await generator.encode("", add_special_tokens=True)
    middle = [] if marks.middle is None else [marks.middle]
    return [*begin, *extra, *parts[0], *parts[1], *middle]
