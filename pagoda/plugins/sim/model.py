# SPDX-License-Identifier: Apache-2.0
"""The simulated model: what it samples, how likely that was, and its vectors."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from pagoda.messages.frontend import TokenLogprobs

_MASK = 2**64 - 1
_NUM_ANSWERS = 250


def sim_token(seed: int, position: int, previous_token_id: int, vocab_size: int) -> int:
    """The token that the simulated model samples behind `previous_token_id`; SplitMix64 (Steele et al. 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + previous_token_id) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) % vocab_size


def seed_of_length(length: int, number: int) -> int:
    """The seed of a request whose answer has so many tokens, 0 at its end; `number` tells answers apart."""
    return (number % _NUM_ANSWERS) << 32 | length


def length_of_seed(seed: int) -> int:
    """The tokens of the answer that `seed_of_length` stands for."""
    return seed & 0xFFFFFFFF


def token_by_seed(seed: int, position: int) -> int:
    """The token at a position of the answer that `seed_of_length` stands for."""
    return 0 if position + 1 >= length_of_seed(seed) else 1 + (seed >> 32)


def sim_logprob(previous_token_id: int, token_id: int) -> float:
    """The log-probability that the simulated model gives to a prompt token, from -4 to 0."""
    return -sim_token(token_id, 0, previous_token_id, 4096) / 1024


def token_logprobs(token_id: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """The chosen token, of probability 1/2, and those behind it in the vocabulary, each half as likely as the one
    before."""
    ranks = range(min(num_top, vocab_size))
    ids = [(token_id + rank) % vocab_size for rank in ranks]
    logprobs = [(rank + 1) * -math.log(2) for rank in ranks]
    return TokenLogprobs(-math.log(2), 1, ids, logprobs)


def sim_embedding(token_ids: Sequence[int]) -> bytes:
    """The vector of a prompt: eight elements from -1 to 1."""
    total = sum(token_ids)
    elements = (sim_token(total, i, len(token_ids), 2049) / 1024 - 1 for i in range(8))
    return array("f", elements).tobytes()
