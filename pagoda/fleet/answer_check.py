# SPDX-License-Identifier: Apache-2.0
"""Checks of what a peer sends of one answer, which the decoder cannot check: it goes by what was asked for."""

from __future__ import annotations

from pagoda.messages.frontend import (
    FinishReason,
    GenerateRequest,
    Pooling,
    PromptLogprobs,
    TokenChunk,
    TokenLogprobs,
)
from pagoda.messages.ranges import MAX_COUNT
from pagoda.messages.sampling_params import ALL_LOGPROBS

_FAILURES = FinishReason.ERROR, FinishReason.ABORT


class PeerError(Exception):
    """A peer said what cannot be, so nothing that it says counts; `str` is a clause: `sent ...`."""


class AnswerCheck:
    """Bounds of what may still come of one answer. Costs a glance at each chunk, in proportion to its length."""

    __slots__ = (
        *("_is_pooled", "_num_left", "_num_prompt", "_num_top", "_scores", "_vector_bytes"),
        "_vocab_size",
    )

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        sampling = request.work.sampling
        self._vocab_size = vocab_size
        self._num_prompt = len(request.prompt_token_ids)
        most = MAX_COUNT if sampling.max_tokens is None else sampling.max_tokens
        self._num_left = most - len(request.output_token_ids)
        self._num_top = _most(sampling.logprobs, vocab_size)
        self._is_pooled = request.work.pooling is not None
        of_tokens = request.work.pooling in (Pooling.ALL, Pooling.WEIGHTS)
        self._vector_bytes = 4 * (self._num_prompt if of_tokens else 1)
        """Bytes that those of a vector, or of the vectors of all tokens, are a multiple of."""
        self._scores: list[int] | None = None
        """Position up to which prompt tokens have their log-probabilities, and likeliest tokens of each."""
        num_top = _most(sampling.prompt_logprobs, vocab_size)
        if num_top is not None:
            self._scores = [max(1, request.num_scored_tokens), num_top]

    def take(self, chunk: TokenChunk) -> None:
        """Raises PeerError: the chunk cannot be part of the answer."""
        token_ids = chunk.token_ids
        if token_ids:
            self._num_left -= len(token_ids)
            if self._num_left < 0:
                raise PeerError("sent more tokens of an answer than were asked for")
            self._check_ids(token_ids)
        if chunk.num_cached_tokens > self._num_prompt:
            raise PeerError("sent more cached tokens than a prompt has")
        if chunk.logprobs is not None or (token_ids and self._num_top is not None):
            self._check_logprobs(token_ids, chunk.logprobs or [])
        if chunk.prompt_logprobs is not None:
            self._check_scores(chunk.prompt_logprobs)
        is_end = chunk.finish_reason is not None
        if token_ids or is_end or chunk.embedding is not None:
            self._check_whole(chunk, is_failure=chunk.finish_reason in _FAILURES)

    def _check_ids(self, token_ids: list[int]) -> None:
        if max(token_ids) >= self._vocab_size:
            raise PeerError(
                f"sent token {max(token_ids)}, and its vocabulary has {self._vocab_size}"
            )

    def _check_logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        num_top = self._num_top
        if num_top is None or len(logprobs) != len(token_ids):
            raise PeerError("sent log-probabilities of other tokens than it sent")
        if not all(one.fits(self._vocab_size, num_top) for one in logprobs):
            raise PeerError("sent log-probabilities that were not asked for, or of no tokens")

    def _check_scores(self, scores: PromptLogprobs) -> None:
        known = self._scores
        if known is None or scores.first > known[0]:
            raise PeerError("sent log-probabilities of a prompt that were not asked for")
        if not scores.fits(self._vocab_size, known[1], self._num_prompt):
            raise PeerError("sent log-probabilities that the prompt cannot have")
        known[0] = max(known[0], scores.end)

    def _check_whole(self, chunk: TokenChunk, *, is_failure: bool) -> None:
        """Checks that what comes before the answer, or with its end, has come."""
        vector = chunk.embedding
        if not self._is_pooled or is_failure:
            if vector is not None:
                raise PeerError("sent a vector that was not asked for")
        elif not vector or len(vector) % self._vector_bytes:
            raise PeerError("sent no vector, or a part of one")
        if self._scores and not is_failure and self._scores[0] < self._num_prompt:
            raise PeerError("sent an answer without the log-probabilities of its prompt")


def _most(num_top: int | None, vocab_size: int) -> int | None:
    return vocab_size if num_top == ALL_LOGPROBS else num_top
