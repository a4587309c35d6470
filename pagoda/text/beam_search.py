# SPDX-License-Identifier: Apache-2.0
"""Beam search over an endpoint of tokens: each step asks for one more token of every beam.

The beams of a step have their prompt and most of their tokens in common, which the prefix cache of the engine
shares. What counts as finished, how lengths are weighed and when the search ends is as in transformers
(`GenerationMixin._beam_search`).
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, cast

import msgspec

from pagoda.concurrency.async_utils import LONG_TEXT_CHARS, gather_all
from pagoda.errors import refuse
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs
from pagoda.messages.sampling_params import Range, SamplingParams
from pagoda.text.text_generator import TextAssembler, TextDelta, TextGenerator, TextRequest

MAX_BEAMS = 64
_FEW = 8
"""Tokens that are never said among the likeliest ones of a step, as far as is expected."""


class BeamSearchError(Exception):
    """The engine failed with a beam. The words are for the log, not for the client."""


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a search, named as in vLLM and transformers."""

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    """The sum of log-probabilities of a beam is divided by its number of tokens to this power, with those that a
    model's files force."""
    early_stopping: bool | Literal["never"] = False
    """True ends as soon as there are `beam_width` complete beams, False when a better one is unlikely, `never`
    only when there cannot be one."""

    def checked(self, vocab_size: int) -> BeamSearchParams:
        """Raises InvalidRequestError: a value is out of range; names the field."""
        most = min(MAX_BEAMS, vocab_size)  # an answer of one token is one of so many
        if not 1 <= self.beam_width <= most:
            refuse("beam_width", f"must be from 1 to {most}, got {self.beam_width}")
        if self.max_tokens < 1:
            refuse("max_tokens", f"must be at least 1, got {self.max_tokens}")
        Range(-100.0, 100.0).check("length_penalty", self.length_penalty)
        return self


@dataclass(frozen=True)
class Beam:
    """A sequence of output tokens with the sum of their log-probabilities."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    entries: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities at each position, of the token and of the likeliest ones."""
    score: float = 0.0
    """`cumulative_logprob` by the length penalty, of a finished beam."""

    def extended(self, top: TokenLogprobs, index: int) -> Beam:
        """The beam with one of the likeliest tokens behind it."""
        logprob = top.top_logprobs[index]
        entry = TokenLogprobs(logprob, index + 1, top.top_token_ids, top.top_logprobs)
        token_ids = (*self.token_ids, top.top_token_ids[index])
        return Beam(token_ids, self.cumulative_logprob + logprob, (*self.entries, entry))


class BeamSearch:
    """The beams of one prompt; knows no models."""

    def __init__(
        self, params: BeamSearchParams, end_token_ids: Collection[int], num_forced: int = 0
    ) -> None:
        """`num_forced` tokens at the prompt's end are of the answer where its length counts: a model's files force
        them."""
        self._params, self._num_forced = params, num_forced
        self._ends = frozenset(end_token_ids)
        self.running = [Beam()]
        """Unfinished beams, the likeliest first."""
        self.finished: list[Beam] = []
        """The best finished beams, by their scores."""
        self._num_steps = 0
        self._may_improve = True
        self.is_over = False

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens of each beam that a step looks at: enough to go on with without those that end."""
        return max(2, 1 + len(self._ends)) * self._params.beam_width

    def advance(self, likeliest: Sequence[TokenLogprobs]) -> None:
        """Goes on one token with the likeliest tokens behind each of `running`."""
        params, width = self._params, self._params.beam_width
        self._num_steps += 1
        pairs = list(zip(self.running, likeliest, strict=True))
        places = [
            (-(beam.cumulative_logprob + logprob), index, rank)
            for index, (beam, top) in enumerate(pairs)
            for rank, logprob in enumerate(top.top_logprobs)
        ]
        best = heapq.nsmallest(self.num_candidates, places)
        candidates = [pairs[index][0].extended(pairs[index][1], rank) for _, index, rank in best]
        is_last = self._num_steps >= params.max_tokens
        going_on = [beam for beam in candidates if not (is_last or self._ends_with_end(beam))]
        # Candidates behind the first `width` are there to go on with only.
        ended = [beam for beam in candidates[:width] if is_last or self._ends_with_end(beam)]
        if self._may_improve and not (self._is_full and params.early_stopping is True):
            self.finished += [self._scored(beam) for beam in ended]
            self.finished.sort(key=lambda beam: -beam.score)
            del self.finished[width:]
        self.running = going_on[:width]
        self._may_improve &= self._can_improve()
        is_complete = self._is_full and params.early_stopping is True
        self.is_over = not self._may_improve or is_complete or not going_on

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self._params.beam_width

    def _ends_with_end(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._ends

    def _scored(self, beam: Beam) -> Beam:
        length = self._num_forced + self._num_steps
        score = beam.cumulative_logprob / length**self._params.length_penalty
        return Beam(beam.token_ids, beam.cumulative_logprob, beam.entries, score)

    def _can_improve(self) -> bool:
        """True if a running beam may yet become better than the worst of the finished ones."""
        params = self._params
        if not self.running or not self._is_full:
            return bool(self.running)
        is_patient = params.early_stopping == "never" and params.length_penalty > 0
        length = self._num_forced + (params.max_tokens if is_patient else self._num_steps)
        best = self.running[0].cumulative_logprob / length**params.length_penalty
        return bool(best > self.finished[-1].score)


async def beam_search(
    generator: TextGenerator, request: TextRequest, params: BeamSearchParams
) -> list[tuple[Beam, TextDelta]]:
    """The best beams behind the prompt of `request`, the best first, each with its text.

    Of `request.sampling` the fields about end tokens and text count; `params.max_tokens` must fit the context.
    A server that drains finishes a search that has begun.
    Raises BeamSearchError: the engine failed. OverloadedError, DeadlineError, EngineDeadError: as
    `Endpoint.generate`.
    """
    ends = {*request.request.work.eos_token_ids, *request.sampling.stop_token_ids}
    # A decoder's prompt, where an encoder reads the client's, is its start and what is forced behind it.
    num_forced = len(request.request.prompt_token_ids) - 1 if request.read_token_ids else 0
    search = BeamSearch(params, ends, num_forced)
    tracker, num_cached_tokens = generator.tracker, None
    with (
        tracker.answering(request.request, request.client_request) as record,
        generator.endpoint.hold(request.request.body),
    ):
        value = record.with_span(request.request)
        while not search.is_over:
            timed = record.with_time_left(value, tracker.clock_ns())
            turns = asyncio.Semaphore(1 + LONG_TEXT_CHARS // len(value.prompt_token_ids))
            steps = [_next_token(generator, timed, beam, search, turns) for beam in search.running]
            chunks = await gather_all(steps)
            if num_cached_tokens is None:
                num_cached_tokens = chunks[0].num_cached_tokens
            search.advance([entry for chunk in chunks for entry in chunk.logprobs or ()])
            tracker.add_tokens(record, 1)
        record.ending = FinishReason.STOP, ""
    return [
        (beam, _text(generator, request, beam, num_cached_tokens or 0)) for beam in search.finished
    ]


async def _next_token(
    generator: TextGenerator,
    value: GenerateRequest,
    beam: Beam,
    search: BeamSearch,
    turns: asyncio.Semaphore,
) -> TokenChunk:
    """The chunk with the likeliest tokens behind a beam. Other streams go on between the long prompts of beams,
    which take turns."""
    async with turns:
        await asyncio.sleep(0)
    vocab_size, never = generator.endpoint.limits.vocab_size, frozenset(value.work.never)
    wanted = max(search.num_candidates, value.work.sampling.logprobs or 0)
    # Few of the tokens that are never said are likely ones: all of them are asked for only where they are.
    most, more = min(wanted + len(never), vocab_size), _FEW
    while True:
        num_top = min(wanted + more, most)
        chunk = await _one_token(generator, value, beam, num_top)
        entries = [_without(entry, never, wanted) for entry in chunk.logprobs or ()]
        if num_top == most or all(len(it.top_token_ids) == wanted for it in entries):
            return msgspec.structs.replace(chunk, logprobs=entries)
        more *= 8


def _without(entry: TokenLogprobs, never: Collection[int], most: int) -> TokenLogprobs:
    """The entry with so many of its likeliest tokens at most, without those of `never`."""
    pairs = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    kept = [(token_id, logprob) for token_id, logprob in pairs if token_id not in never][:most]
    token_ids, logprobs = [it for it, _ in kept], [it for _, it in kept]
    return msgspec.structs.replace(entry, top_token_ids=token_ids, top_logprobs=logprobs)


async def _one_token(
    generator: TextGenerator, value: GenerateRequest, beam: Beam, num_top: int
) -> TokenChunk:
    """The chunk with so many likeliest tokens behind a beam."""
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=1, logprobs=num_top)
    one = msgspec.structs.replace(
        value,
        request_id=f"{value.request_id}-{secrets.token_hex(4)}",
        prompt_token_ids=[*value.prompt_token_ids, *beam.token_ids],
        work=msgspec.structs.replace(value.work, sampling=sampling, eos_token_ids=()),
        returns=bool(beam.token_ids),
        speculates=False,
    )
    chunks = cast(AsyncGenerator[TokenChunk, None], generator.endpoint.generate(one))
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.error is not None:
                raise BeamSearchError(f"{value.request_id}: {chunk.error}")
            if chunk.token_ids:
                return chunk
    raise BeamSearchError(f"{value.request_id}: it was aborted.")


def _text(
    generator: TextGenerator, request: TextRequest, beam: Beam, num_cached_tokens: int
) -> TextDelta:
    """The whole answer of a beam."""
    last = beam.token_ids[-1]
    reason, stop_reason = FinishReason.LENGTH, None
    if last in request.request.work.eos_token_ids:
        reason = FinishReason.STOP
    elif last in request.sampling.stop_token_ids:
        reason, stop_reason = FinishReason.STOP, last
    assembler, num_top = TextAssembler(generator.text.tokenizer, request), request.sampling.logprobs
    entries = None
    if num_top is not None:
        entries = [
            TokenLogprobs(
                one.logprob, one.rank, one.top_token_ids[:num_top], one.top_logprobs[:num_top]
            )
            for one in beam.entries
        ]
    chunk = TokenChunk(
        request.request.request_id,
        list(beam.token_ids),
        reason,
        stop_reason,
        entries,
        num_cached_tokens,
    )
    return assembler.push(chunk)
