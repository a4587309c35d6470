# SPDX-License-Identifier: Apache-2.0
"""Wishes of a model's makers, in generation_config.json, that answers do not follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NEUTRAL: Mapping[str, object] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "early_stopping": False,
    "length_penalty": 1,
    "diversity_penalty": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_eos_token_id": None,
    "renormalize_logits": False,
}
"""Fields as transformers names them, with the values that change no answer; null and empty lists change none."""
_OF_SPEECH = ("suppress_tokens", "begin_suppress_tokens")


def fields_not_followed(
    generation: Mapping[str, Any], *, hears: bool, reads: bool
) -> tuple[str, ...]:
    """Fields with values that would change answers, and do not. A model that `hears` leaves out suppressed tokens;
    one whose encoder `reads` texts leaves out bad words of one token."""
    told = dict(generation)
    if hears:
        told |= dict.fromkeys(_OF_SPEECH)
    words = told.get("bad_words_ids")
    if reads and isinstance(words, list):
        told["bad_words_ids"] = [it for it in words if not isinstance(it, list) or len(it) != 1]
    return tuple(
        name for name, neutral in _NEUTRAL.items() if told.get(name) not in (None, [], {}, neutral)
    )
