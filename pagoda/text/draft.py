# SPDX-License-Identifier: Apache-2.0
"""Requests on their way from a body: all that the answers to a prompt need but its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagoda.messages.audio import Alignment, SpeechRules
from pagoda.messages.encoder_input import EncoderInput
from pagoda.messages.frontend import Grammar, KVSource, Pooling
from pagoda.messages.spans import EmbeddedSpan
from pagoda.telemetry.request_tracker import ClientRequest
from pagoda.text.reasoning_border import ReasoningBorder


class FieldGrammar(NamedTuple):
    """A grammar, and the field that asks for it."""

    grammar: Grammar
    param: str
    """The client's name for the grammar in errors."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A request that lacks its prompt and its sampling parameters. `TextGenerator.prepare` completes it.

    Fields without a text are as in `GenerateRequest` and its `Work`.
    """

    param: str = "prompt"
    """The client's name for the prompt in errors."""
    add_special_tokens: bool = True
    clamp_max_tokens: bool = False
    """An answer that would not fit into the context is shortened instead of refused."""
    priority: int = 0
    cache_salt: str | None = None
    speculates: bool = True
    session: str | None = None
    holds_kv: bool = False
    kv_source: KVSource | None = None
    grammar: FieldGrammar | None = None
    shown_tokens: tuple[str, ...] = ()
    """Special tokens that have text though others are skipped: a parser of the answer needs them."""
    border: ReasoningBorder | None = None
    """Stop strings count behind it; None if they count in all of the text."""
    pooling: Pooling | None = None
    second_text_at: int = 0
    spans: tuple[EmbeddedSpan, ...] = ()
    audio: EncoderInput | None = None
    speech: SpeechRules | None = None
    alignment: Alignment | None = None
    num_scored_tokens: int = 0
    scores_once: bool = True
    """The first of several answers alone has the log-probabilities of the prompt."""
    client_request: ClientRequest | None = None
    """The client's request; None for a request of its own."""
