# SPDX-License-Identifier: Apache-2.0
"""Checks of a request that came over a wire, whose sender may be wrong or of another version."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.errors import InvalidRequestError
from pagoda.messages.frontend import EngineReady, GenerateRequest
from pagoda.messages.spans import problem_with_spans


def check_request(request: GenerateRequest, limits: EngineReady) -> None:
    """Raises InvalidRequestError: a value is out of range, a token id is outside the vocabulary, or the prompt is
    empty or longer than the context; a worker is to see nothing of that."""
    request.work.sampling.checked().check_vocabulary(limits.vocab_size)
    lists: dict[str, Sequence[int]] = {
        "prompt_token_ids": request.prompt_token_ids,
        "output_token_ids": request.output_token_ids,
        "eos_token_ids": request.work.eos_token_ids,
        "never": request.work.never,
    }
    for name, ids in lists.items():
        if ids and max(ids) >= limits.vocab_size:
            raise InvalidRequestError(
                f"{name} takes token ids below the vocabulary size {limits.vocab_size}, got {max(ids)}.",
                param=name,
            )
    length = len(request.prompt_token_ids) + len(request.output_token_ids)
    if not request.prompt_token_ids or length > limits.max_model_len:
        raise InvalidRequestError(
            f"a request has 1 to {limits.max_model_len} tokens here, got {length}.",
            param="prompt_token_ids",
        )
    num_tokens, hidden_size = len(request.prompt_token_ids), limits.hidden_size
    if problem := problem_with_spans(request.work.spans, num_tokens, hidden_size):
        raise InvalidRequestError(f"{problem}.", param="spans")
