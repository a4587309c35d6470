# SPDX-License-Identifier: Apache-2.0
"""Clients of a life: what they got, and what they should have got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, cast

from benchmarks.simulation.books import require
from benchmarks.simulation.seeds.draw import (
    ENGINE_POISON,
    VOCAB_SIZE,
    WORKER_POISON,
    Ask,
    Plan,
)
from benchmarks.simulation.seeds.executor import NAN
from pagoda.errors import DeadlineError, InvalidRequestError, OverloadedError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk
from pagoda.messages.worker_config import Role
from pagoda.plugins.sim.model import sim_logprob, sim_token

MAX_HARMLESS_DEATHS = 2
"""Deaths of workers and engines that no innocent request fails of: `MAX_CRASHES` of both quarantines is higher."""
_SAME_TIME_S = 1e-6
_SOON_S = 0.05


@dataclass
class Answer:
    """The answer that a client got."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str = ""
    num_cached_tokens: int | None = None
    outcome: str = ""
    """`ended`, `refused`, `invalid`, `late`, `left`, `cancelled`, or `lost` with its home; empty before."""
    num_refusals: int = 0
    took_s: float = 0.0
    """Seconds from when it was asked until the answer ended."""

    def take(self, chunk: TokenChunk) -> None:
        """Raises BrokenInvariantError if the chunk must not come."""
        name = self.ask.request.request_id
        require(chunk.request_id == name, f"{name} got a chunk of {chunk.request_id}.")
        require(self.finish is None, f"{name} got a chunk behind the last one.")
        part = chunk.prompt_logprobs
        if part is not None:
            require(part.first == 1 + len(self.scores), f"{name} got scores out of order.")
            self.scores += [entry.logprob for entry in part.entries()]
        if chunk.is_news:
            return
        if chunk.token_ids and self.ask.request.work.sampling.logprobs is not None:
            is_whole = len(chunk.logprobs or ()) == len(chunk.token_ids)
            require(is_whole, f"{name} lacks log-probabilities of tokens.")
        self.tokens += chunk.token_ids
        self.finish, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        self.error = chunk.error or ""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = chunk.num_cached_tokens


def expected_tokens(request: GenerateRequest, max_model_len: int) -> list[int]:
    """The answer of the simulated model, a pure function of the request."""
    sampling = request.work.sampling
    stops = {*request.work.eos_token_ids, *sampling.stop_token_ids}
    previous, output = request.prompt_token_ids[-1], list[int]()
    most = min(sampling.max_tokens or 0, max_model_len - len(request.prompt_token_ids))
    while len(output) < most:
        previous = sim_token(sampling.seed or 0, len(output), previous, VOCAB_SIZE)
        while len(output) < sampling.min_tokens and previous in stops:
            previous = (previous + 1) % VOCAB_SIZE
        output.append(previous)
        if previous in stops and len(output) >= sampling.min_tokens:
            break
    return output


class Home(Protocol):
    """A router or a host that clients ask."""

    dispatcher: Dispatcher

    @property
    def is_up(self) -> bool: ...


async def ask(answer: Answer, home: Home) -> None:
    """Sends the request until it is taken or the client gives up, and reads the answer."""
    it = answer.ask
    for attempt in range(1 + it.num_retries):
        while not home.is_up:
            await asyncio.sleep(0.1)
        asked_at = asyncio.get_running_loop().time()
        try:
            await _read(answer, home.dispatcher)
            answer.took_s = asyncio.get_running_loop().time() - asked_at
            return
        except OverloadedError as error:
            require(not answer.tokens, f"{it.request.request_id} was refused behind tokens.")
            require(error.retry_after_s >= 0, "A refusal names no time.")
            answer.num_refusals += 1
            if attempt == it.num_retries:
                answer.outcome = "refused"
                return
            await asyncio.sleep(max(0.1, min(error.retry_after_s, 2.0)))
        except DeadlineError:
            timeout_s, now = it.request.timeout_s, asyncio.get_running_loop().time()
            text = f"{it.request.request_id} was ended before its deadline."
            require(timeout_s is not None and now >= asked_at + timeout_s - _SAME_TIME_S, text)
            answer.outcome = "late"
            return
        except InvalidRequestError as error:
            answer.outcome, answer.error = "invalid", str(error)
            return


async def _read(answer: Answer, dispatcher: Dispatcher) -> None:
    it = answer.ask
    chunks = cast(AsyncGenerator[TokenChunk, None], dispatcher.generate(it.request))
    async with aclosing(chunks):
        async for chunk in chunks:
            answer.take(chunk)
            has_enough = it.leaves_after is not None and len(answer.tokens) >= it.leaves_after
            if has_enough and answer.finish is None:
                answer.outcome = "left"
                return
            if it.reads_every_s:
                await asyncio.sleep(it.reads_every_s)
    name = it.request.request_id
    require(answer.finish is not None, f"The stream of {name} ended without an end.")
    answer.outcome = "ended"


def check_answers(plan: Plan, answers: Sequence[Answer], num_deaths: int, outages: bool) -> None:
    """Raises BrokenInvariantError unless each answer is whole, or ended as the plan explains.

    `num_deaths` counts workers and engines that died; `outages` says that hosts were gone for long.
    """
    for answer in answers:
        _check(plan, answer, num_deaths, outages)
        _check_cached(plan, answer, answers)


def _check(plan: Plan, answer: Answer, num_deaths: int, outages: bool) -> None:
    it, request = answer.ask, answer.ask.request
    name = request.request_id
    whole = expected_tokens(request, plan.engine.max_model_len)
    require(
        answer.tokens == whole[: len(answer.tokens)], f"{name} got other tokens than it should."
    )
    if answer.outcome in ("left", "cancelled", "lost", "late"):
        return
    if answer.outcome == "refused":
        require(not answer.tokens, f"{name} was refused behind tokens.")
        return
    if answer.outcome == "invalid":
        is_explained = len(request.prompt_token_ids) > plan.engine.max_model_len
        require(is_explained, f"{name} was refused as invalid: {answer.error}")
        return
    require(answer.outcome == "ended", f"{name} has no end.")
    is_prompt = not (it.reads_every_s or plan.faults or plan.chances.is_late)
    if request.timeout_s is not None and is_prompt:
        is_in_time = answer.took_s <= request.timeout_s + _SOON_S
        require(is_in_time, f"{name} went on behind its deadline.")
    if answer.finish is FinishReason.ABORT:
        require(it.aborts_at is not None, f"{name} was aborted, and nobody has asked for it.")
        return
    if answer.finish is FinishReason.ERROR:
        is_explained = _explains(plan, answer, num_deaths, outages)
        require(is_explained, f"{name} failed, and nothing explains it: {answer.error}")
        return
    require(answer.tokens == whole, f"{name} got {len(answer.tokens)} tokens of {len(whole)}.")
    stops = {*request.work.eos_token_ids, *request.work.sampling.stop_token_ids}
    is_stop = whole[-1] in stops and len(whole) >= request.work.sampling.min_tokens
    reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
    require(answer.finish is reason, f"{name} ended by {answer.finish} instead of {reason}.")
    is_nan = it.nan_at is not None and it.nan_at < len(whole)
    require(not is_nan, f"{name} has tokens behind logits that were not numbers.")
    if request.work.sampling.prompt_logprobs is not None:
        scores = [sim_logprob(one, other) for one, other in pairwise(request.prompt_token_ids)]
        require(answer.scores == scores, f"{name} got other scores than it should.")


def _explains(plan: Plan, answer: Answer, num_deaths: int, outages: bool) -> bool:
    it, error = answer.ask, answer.error
    prompt = it.request.prompt_token_ids
    if error == NAN:
        return it.nan_at is not None and len(answer.tokens) <= it.nan_at
    if "died" in error:
        is_poisoned = WORKER_POISON in prompt or ENGINE_POISON in prompt
        return is_poisoned or num_deaths > MAX_HARMLESS_DEATHS
    if "could not be read from a tier" in error or "fits neither the device" in error:
        may_fail = plan.chances.transfer_failed > 0 or bool(plan.faults)
        return plan.engine.segment_tokens > 0 and may_fail
    if "could not be" in error:
        return plan.engine.fails_on_load_failure
    if "No replica has taken requests" in error:
        return outages
    if "The prompt has" in error:
        return len(prompt) >= plan.engine.max_model_len
    return False


def _check_cached(plan: Plan, answer: Answer, answers: Sequence[Answer]) -> None:
    """Cached tokens were computed by a request with the same salt and adapter."""
    if not answer.num_cached_tokens or _may_find_its_own(plan, answer):
        return
    own, most = answer.ask.request, 0
    for other in answers:
        it = other.ask.request
        if (
            other is not answer
            and it.cache_salt == own.cache_salt
            and it.work.adapter == own.work.adapter
        ):
            tokens = [*it.prompt_token_ids, *expected_tokens(it, plan.engine.max_model_len)]
            most = max(most, _num_common(own.prompt_token_ids, tokens))
    text = f"{own.request_id} found {answer.num_cached_tokens} tokens, and others computed {most}."
    require(answer.num_cached_tokens <= most, text)


def _may_find_its_own(plan: Plan, answer: Answer) -> bool:
    """True where a request may come to an engine that has computed it before, or for it.

    One that was refused may: it gives its place in the queue to a lighter tenant as long as its frontend does not
    know that the engine has begun it, and the client asks again.
    """
    poisons = {WORKER_POISON, ENGINE_POISON}
    is_poisoned = any(poisons & {*it.request.prompt_token_ids} for it in plan.asks)
    has_handoff = any(host.role is not Role.NONE for host in plan.hosts)
    return bool(plan.faults or answer.num_refusals) or is_poisoned or has_handoff


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    number = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        number += 1
    return number
