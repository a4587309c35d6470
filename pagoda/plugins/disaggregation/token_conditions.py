# SPDX-License-Identifier: Apache-2.0
"""Conditions of a first token: what two engines must have in common for one to take over what the other sampled.

Proxies send two requests for one answer, and some change the first one: `min_tokens: 1` for the prefill server
alone holds back the token that would have ended an empty answer. Such a token is no sample of the answer that was
asked for.
"""

from __future__ import annotations

import hashlib

import msgspec

from pagoda.engine.request import Request
from pagoda.messages.frontend import Grammar
from pagoda.messages.sampling_params import SamplingParams


def token_conditions(
    sampling: SamplingParams,
    end_token_ids: frozenset[int],
    num_output_tokens: int,
    grammar: Grammar | None = None,
) -> bytes:
    """A digest of all that shapes the distribution of the token at index `num_output_tokens` of an answer.

    Equal where the next token may be taken over. The seed is left out: where the client gave none, both servers
    have drawn one, and a sample under either is right. Parameters of later tokens and of text are left out, too.
    """
    holds_back = num_output_tokens < sampling.min_tokens
    shaping = msgspec.structs.replace(
        sampling,
        seed=None,
        max_tokens=None,
        min_tokens=0,
        stop=(),
        stop_token_ids=tuple(sorted(end_token_ids)) if holds_back else (),
        ignore_eos=False,
        logprobs=None,
        n=1,
        include_stop_str_in_output=False,
        skip_special_tokens=True,
    )
    if sampling.greedy:  # whatever is cut off, the most likely token stays
        shaping = shaping.without_draws()
    biases = sorted((sampling.logit_bias or {}).items())
    shaping = msgspec.structs.replace(shaping, logit_bias=None)
    return hashlib.sha256(msgspec.msgpack.encode((shaping, biases, grammar))).digest()


def conditions_of(request: Request) -> bytes:
    """`token_conditions` of the next token of a request."""
    return token_conditions(
        request.work.sampling,
        request.end_token_ids,
        request.num_output_tokens,
        request.message.grammar,
    )
