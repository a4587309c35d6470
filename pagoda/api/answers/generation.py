# SPDX-License-Identifier: Apache-2.0
"""Generation for one body: the answers in one piece or as a stream of events, in the shape of the route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from pagoda.api.bodies.constraint_fields import constraint_of, constraint_size
from pagoda.api.bodies.fields import (
    GenerationFields,
    beam_search_params,
    check_fields,
    sampling_params,
    session_of,
)
from pagoda.api.errors import GenerationError
from pagoda.api.handoffs import Asked
from pagoda.api.http.request_context import Caller, RequestContext
from pagoda.api.http.sse import EventStream
from pagoda.concurrency.async_utils import gather_all
from pagoda.errors import refuse
from pagoda.messages.frontend import KVSource
from pagoda.telemetry.request_tracker import RequestStatistics
from pagoda.telemetry.speculation import SpeculationCounts
from pagoda.text.beam_search import BeamSearchParams, beam_search
from pagoda.text.draft import Draft
from pagoda.text.text_generator import TextDelta, TextGenerator, TextRequest

Prompt = str | Sequence[int]

MAX_KEPT_LOGPROBS = 4 << 20
"""Log-probabilities that the answers to one body may tell of their prompts, and in one piece of their tokens. Each
takes a hundred bytes or two until it is sent."""


ANSWER_CHARS = 64
"""Characters of a text that takes as long as an empty answer."""


class AnswerShape(Protocol):
    """One answer in the shape of its route."""

    @property
    def is_complete(self) -> bool:
        """No further delta is wanted, even if the engine has not finished."""
        ...

    def add(self, delta: TextDelta) -> None:
        """Adds a delta to a response in one piece."""
        ...

    def events(self, delta: TextDelta) -> bytes:
        """The events of a delta in a stream; empty if the client sees nothing of the delta."""
        ...


class Shape(Protocol):
    """The shape that a route gives to the answers of a body."""

    @property
    def answers(self) -> Sequence[AnswerShape]:
        """One answer for each of the requests of the generation, in their order."""
        ...

    def whole(self) -> dict[str, Any]:
        """The response in one piece, once all answers are complete."""
        ...

    def end(self) -> bytes:
        """The last events of a stream, behind those of the answers."""
        ...


@dataclass
class TokenUsage:
    """Tokens that the client is told of."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int | None = None
    """Completion tokens of reasoning; None if the answers are no messages."""


class Generation:
    """The requests of one body on their way to their answers."""

    def __init__(
        self,
        generator: TextGenerator,
        requests: Sequence[TextRequest],
        beams: BeamSearchParams | None = None,
        transfer_fields: Callable[[KVSource | None], dict[str, Any]] = lambda _: {},
    ) -> None:
        """`beams` lets the answers to each prompt be its best beams; `transfer_fields` are `Handoffs.fields`."""
        self.generator = generator
        self._beams = beams
        self.transfer_fields = transfer_fields
        self.requests = requests
        prompts = [r.prompt_token_ids for r in requests if r.index == 0]
        self.usage = TokenUsage(sum(map(len, prompts)))
        self.kv_source: KVSource | None = None
        """The place of a prompt's KV that is held for another engine, once it is there."""
        self._cached_by_answer: dict[int, int] = {}
        self._records: dict[int, RequestStatistics] = {}
        """Statistics of answers that have begun."""
        self._num_kept = sum(map(_num_prompt_logprobs, requests))
        """Log-probabilities that a response in one piece has so far."""

    def rename_constraints(self, names: Mapping[str, str]) -> None:
        """Lets the engine's errors about constraints name the client's fields: `names` are those of `renamed`."""
        grammar = self.requests[0].draft.grammar
        if grammar is not None and grammar.param in names:
            grammar = grammar._replace(param=names[grammar.param])
            draft = replace(self.requests[0].draft, grammar=grammar)
            self.requests = [replace(request, draft=draft) for request in self.requests]

    async def run(self, shape: Shape) -> dict[str, Any]:
        """Generates all answers; returns the response in one piece.
        Raises GenerationError: the engine failed with a request. InvalidRequestError: too many `logprobs`."""
        if self._beams is None:
            works = [self._run(index, answer) for index, answer in enumerate(shape.answers)]
        else:
            firsts = [i for i, request in enumerate(self.requests) if request.index == 0]
            works = [self._search(first, shape.answers, self._beams) for first in firsts]
        await gather_all(works)
        return await self.generator.run_sized(shape.whole, self.size)

    @property
    def size(self) -> int:
        """Tokens and log-probabilities of a response in one piece, each of which takes about as long as a
        character, and what its answers take beside them."""
        return self.usage.num_completion_tokens + self._num_kept + ANSWER_CHARS * len(self.requests)

    def speculation(self) -> SpeculationCounts:
        """Counts of the drafts of all answers so far."""
        whole = SpeculationCounts()
        for record in self._records.values():
            whole.add(record.speculation)
        return whole

    async def _search(
        self, first: int, answers: Sequence[AnswerShape], beams: BeamSearchParams
    ) -> None:
        """Brings the answers to one prompt, from `first` on, to their end."""
        request = self.requests[first]
        found = await beam_search(self.generator, request, beams)
        for index, (_, delta) in enumerate(found[: request.sampling.n], start=first):
            self._count(index, delta)
            self._keep(index, delta)
            answers[index].add(delta)

    async def stream(self, shape: Shape, stream: EventStream) -> None:
        """Generates all answers, as events to `stream`. Raises GenerationError: as `run`."""
        answers = enumerate(shape.answers)
        await gather_all([self._run(index, answer, stream) for index, answer in answers])
        await stream.send(shape.end())

    async def respond(
        self,
        context: RequestContext,
        shape: Shape,
        *,
        streams: bool,
        keep: Callable[[dict[str, Any], int], Awaitable[None]] | None = None,
    ) -> web.StreamResponse:
        """The response to an HTTP request, as a stream or in one piece, which `keep` is told with its size."""
        if streams:
            return await context.stream(lambda stream: self.stream(shape, stream))
        whole = await self.run(shape)
        if keep is not None:
            await keep(whole, self.size)
        return await context.sized_json(whole, self.size)

    async def _run(
        self, index: int, answer: AnswerShape, stream: EventStream | None = None
    ) -> None:
        """Brings one answer to its end: as events to `stream`, or without one in one piece."""
        async with aclosing(self.generator.stream(self.requests[index])) as deltas:
            async for delta in deltas:
                self._count(index, delta)
                if stream is None:
                    self._keep(index, delta)
                    answer.add(delta)
                elif delta.prompt_logprobs is not None:
                    size = _num_prompt_logprobs(self.requests[index])
                    work = partial(answer.events, delta)
                    await stream.send(await self.generator.run_sized(work, size))
                elif not stream.write(answer.events(delta)):
                    await stream.flush()
                if answer.is_complete:
                    break

    def _keep(self, index: int, delta: TextDelta) -> None:
        """Counts the log-probabilities of a delta of a response in one piece."""
        num_top = self.requests[index].sampling.logprobs
        if num_top is not None:
            self._num_kept += len(delta.token_ids) * (1 + num_top)
            if self._num_kept > MAX_KEPT_LOGPROBS:
                most = f"more than {MAX_KEPT_LOGPROBS} log-probabilities in one piece"
                refuse("logprobs", f"asks for {most}; ask for fewer, or for a stream")

    def _count(self, index: int, delta: TextDelta) -> None:
        if delta.error is not None:
            request_id = self.requests[index].request.request_id
            raise GenerationError(f"{request_id}: {delta.error}")
        if index not in self._records:
            record = self.generator.tracker.running.get(self.requests[index].request.request_id)
            if record is not None:
                self._records[index] = record
        self.kv_source = delta.kv_source or self.kv_source
        usage = self.usage
        usage.num_completion_tokens += len(delta.token_ids)
        num_cached = delta.num_cached_tokens
        if num_cached and self.requests[index].index == 0:
            usage.num_cached_tokens += num_cached - self._cached_by_answer.get(index, 0)
            self._cached_by_answer[index] = num_cached


def _num_prompt_logprobs(request: TextRequest) -> int:
    """Log-probabilities that an answer may tell of its prompt."""
    num_top = request.sampling.prompt_logprobs
    return 0 if num_top is None else len(request.prompt_token_ids) * (1 + num_top)


async def prepare(
    caller: Caller,
    body: GenerationFields,
    generator: TextGenerator,
    prompts: Sequence[Prompt],
    counts: Mapping[str, int | None],
    draft: Draft,
) -> Generation:
    """The requests of all prompts of a body. `counts` are `max_tokens`, `logprobs` and `prompt_logprobs` as the
    route reads them. The body completes `draft`; without a grammar that of the body counts.
    Raises InvalidRequestError: a value is not as it must be; names the field."""
    check_fields(body)
    if draft.grammar is None:
        make = partial(constraint_of, body)
        grammar = await generator.run_sized(make, constraint_size(body))
        draft = replace(draft, grammar=grammar)
    fields, max_tokens = {**counts}, counts["max_tokens"]
    role, handoffs = generator.endpoint.limits.role, caller.service.handoffs
    asked = Asked(body, len(prompts), max_tokens, role, caller.authorization)
    handoff = await handoffs.handoff(asked)
    if body.best_of is not None and not body.use_beam_search:
        fields["n"] = body.best_of
    if handoff.holds_kv and body.min_tokens is not None and max_tokens is not None:
        # Proxies ask the prefill server for one token, whatever `min_tokens` their client has sent.
        fields["min_tokens"] = min(body.min_tokens, max_tokens)
    sampling = generator.check_sampling(
        sampling_params(body, generator.text.default_sampling, fields)
    )
    draft = replace(
        draft,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        speculates=body.speculation != "off",
        session=session_of(body, caller.session),
        holds_kv=handoff.holds_kv,
        kv_source=handoff.kv_source,
        scores_once=not body.stream,
        client_request=caller.client_request,
    )
    requests: list[TextRequest] = []
    for prompt in prompts:
        requests += await generator.prepare(prompt, sampling, draft)
    num_scores = sum(map(_num_prompt_logprobs, requests))
    if num_scores > MAX_KEPT_LOGPROBS:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        refuse(
            name,
            f"asks for {num_scores} log-probabilities of prompt tokens in all answers together, "
            f"at most {MAX_KEPT_LOGPROBS} are told",
        )
    if handoff.on_kv_source is not None:
        tell = handoff.on_kv_source
        requests = [replace(request, on_kv_source=tell) for request in requests]
    beams = None
    if body.use_beam_search:
        if requests[0].request.grammar is not None:
            refuse("use_beam_search", "does not go together with a grammar", "not_supported")
        resolved = [request.request.work.sampling.max_tokens or 0 for request in requests]
        beams = beam_search_params(body, min(resolved), generator.endpoint.limits.vocab_size)
    return Generation(generator, requests, beams, handoffs.fields)
