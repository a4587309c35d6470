# SPDX-License-Identifier: Apache-2.0
"""Checks of what requests bring for a model's encoder."""

from __future__ import annotations

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.request import Request
from pagoda.messages.encoder_input import TOKEN_BYTES, EncoderInput, encoder_input, text_input
from pagoda.messages.frontend import Pooling


def least_input(limits: SchedulerLimits) -> EncoderInput | None:
    """Input that costs the encoder least: a text of one token, or silence; None for a model without an encoder."""
    if limits.encodes_text:
        return text_input([0])
    return encoder_input(bytes(limits.feature_bytes)) if limits.feature_bytes else None


def problem_with_input(request: Request, limits: SchedulerLimits) -> str | None:
    """Sentence about a request whose model cannot encode what the request brings, or cannot find in it what is
    asked for; None if it can."""
    given = request.work.encoder_input
    return _problem_with(given, limits) or _problem_with_places(request, limits)


def _problem_with(given: EncoderInput | None, limits: SchedulerLimits) -> str | None:
    size = 0 if given is None else len(given.values)
    if limits.encodes_text:
        return _problem_with_text(given, limits)
    if size == limits.feature_bytes:
        return None
    if not limits.feature_bytes:
        return "The model is given text alone, and hears no audio."
    if not size:
        return "The model transcribes audio; ask POST /v1/audio/transcriptions."
    return f"The features of an audio have {limits.feature_bytes} bytes, got {size}."


def _problem_with_text(given: EncoderInput | None, limits: SchedulerLimits) -> str | None:
    if given is None:
        return "The model's encoder is given no text; ask POST /v1/completions."
    count, rest = divmod(len(given.values), TOKEN_BYTES)
    if rest or not 0 < count <= limits.max_model_len or given.positions != count:
        return f"A text for the encoder has 1 to {limits.max_model_len} tokens."
    ids = memoryview(given.values).cast("i")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        return f"Ids of a text for the encoder are below {limits.vocab_size}."
    return None


def _problem_with_places(request: Request, limits: SchedulerLimits) -> str | None:
    alignment, finds = request.work.alignment, request.work.pooling is Pooling.PLACES
    if not finds and alignment is None:
        return None
    if limits.num_stages > 1:
        return "Times of words are not found on several pipeline stages; ask for those of segments."
    hears = limits.feature_bytes > 0
    if not hears or not finds or alignment is None or alignment.first >= request.num_prompt_tokens:
        return "Places in an audio are those of tokens of a prompt, which an alignment names."
    return None
