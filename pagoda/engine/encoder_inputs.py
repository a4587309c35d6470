# SPDX-License-Identifier: Apache-2.0
"""Checks of what requests bring for a model's encoder."""

from __future__ import annotations

from pagoda.engine.batching import SchedulerLimits
from pagoda.messages.encoder_input import TOKEN_BYTES, EncoderInput


def problem_with_input(given: EncoderInput | None, limits: SchedulerLimits) -> str | None:
    """Sentence about a request whose model cannot encode what the request brings; None if it can."""
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
