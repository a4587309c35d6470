# SPDX-License-Identifier: Apache-2.0
"""Checks of prompts and of the answers that are asked for, against what an endpoint takes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagoda.errors import InvalidRequestError, refuse
from pagoda.messages.frontend import EngineReady
from pagoda.messages.sampling_params import SamplingParams
from pagoda.text.draft import Draft


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt with the answer that was asked for, does not fit into the context."""

    def __init__(self, message: str, *, param: str, num_tokens: int, context: int) -> None:
        """`num_tokens` are those of the prompt, or the fewest that it may have; `context` is their bound."""
        super().__init__(message, param=param)
        self.num_tokens = num_tokens
        self.context = context


def check_prompt(
    token_ids: Sequence[int], limits: EngineReady, param: str, more: str, *, has_answer: bool
) -> None:
    """Raises InvalidRequestError: a prompt, with an answer if it has one, does not fit the endpoint."""
    vocab_size, context = limits.vocab_size, limits.max_model_len
    if not token_ids:
        refuse(param, "is empty; it must hold at least one token")
    if len(token_ids) + has_answer > context:
        rest = ", and at least one must be left for the answer" if has_answer else ""
        raise PromptTooLongError(
            f"{param} has {len(token_ids)} tokens and is longer than the model's context length allows: "
            f"This model's maximum context length is {context} tokens{rest}{more}.",
            param=param,
            num_tokens=len(token_ids),
            context=context,
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        refuse(
            param,
            f"takes token ids from 0 to {vocab_size - 1}, got {wrong}, which is out of vocabulary",
        )


def check_read(sampling: SamplingParams, draft: Draft) -> None:
    """Raises InvalidRequestError: what is asked for is not given of prompts that an encoder reads."""
    if draft.pooling is not None:
        refuse("model", "has an encoder beside its decoder, and gives no vectors or scores")
    if sampling.prompt_logprobs is not None:
        refuse("prompt_logprobs", "is not given of a prompt that the model's encoder reads")


def resolve(
    sampling: SamplingParams, num_prompt_tokens: int, max_model_len: int, more: str, *, clamp: bool
) -> SamplingParams:
    """The parameters for the engine: a definite `max_tokens`, and nothing that the frontend serves."""
    room = max_model_len - num_prompt_tokens
    max_tokens = sampling.max_tokens
    if max_tokens is None or (clamp and max_tokens > room):
        max_tokens = room
    elif max_tokens > room:
        raise PromptTooLongError(
            "Requested token count exceeds the model's maximum context length: "
            f"This model's maximum context length is {max_model_len} tokens, of which the prompt takes "
            f"{num_prompt_tokens}; max_tokens is {max_tokens}, but only {room} are left: max_tokens or "
            f"max_completion_tokens is too large{more}.",
            param="max_tokens",
            num_tokens=num_prompt_tokens,
            context=max_model_len,
        )
    return msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens,
        n=1,
        stop=(),
        structured_outputs=None,
        min_tokens=min(sampling.min_tokens, max_tokens),
    )
