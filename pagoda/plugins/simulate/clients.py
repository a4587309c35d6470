# SPDX-License-Identifier: Apache-2.0
"""Clients of a simulated fleet: sessions of a workload, each of which asks one request after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import OverloadedError, PagodaError
from pagoda.ipc.clock import Clock, LoopClock
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.sim.model import seed_of_length, token_by_seed
from pagoda.plugins.simulate.records import Patience, Records, RequestRecord
from pagoda.plugins.simulate.workload import Session, Turn, Workload, token_ids

USUAL_MAX_TOKENS = 4096
"""`max_tokens` of a request whose length nobody knows beforehand; more if its answer is longer."""
Generate = Callable[[GenerateRequest], AsyncIterator[TokenChunk]]


class Clients:
    """All clients of a workload; who is refused comes again when it is told to."""

    def __init__(
        self,
        workload: Workload,
        generate: Generate,
        records: Records,
        *,
        known_lengths: bool,
        max_model_len: int,
        on_done: Callable[[], None],
        patience: Patience | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Routers are told how long answers will be with `known_lengths`. A request of more than `max_model_len`
        tokens is turned down before it is sent. `clock` tells the time; None takes the event loop's."""
        self._clock = clock or LoopClock()
        self._workload = workload
        self._generate = generate
        self._records = records
        self._known_lengths = known_lengths
        self._max_model_len = max_model_len
        self._on_done = on_done
        self._patience = patience
        self._ended = asyncio.Event()
        """Set when patience is over."""
        self._began = 0.0
        self.by_name: dict[str, RequestRecord] = {}
        """Requests under way."""

    async def run(self) -> None:
        """Returns when the last answer is complete, or patience is over."""
        self._began = self._clock.now()
        both = [asyncio.create_task(it) for it in (self._live_all(), self._ended.wait())]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel_all(both)
        self._records.is_given_up = self._ended.is_set()

    async def _live_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for session in self._workload.sessions:
                if session.at > self.now():
                    await asyncio.sleep(session.at - self.now())
                tasks.create_task(self._live(session))

    def now(self) -> float:
        """Seconds since the first client could come."""
        return self._clock.now() - self._began

    async def _live(self, session: Session) -> None:
        tokens: list[int] = []
        num_tokens = 0
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(turn.pause_s)
                if self.now() > self._workload.duration_s:
                    return  # users would go on for ever
            record = RequestRecord(turn.name, self.now(), 0 if turn.fresh else num_tokens)
            record.num_prompt_tokens += sum(piece.num_tokens for piece in turn.pieces)
            self._records.requests.append(record)
            num_tokens = record.num_prompt_tokens + turn.output_tokens
            if num_tokens > self._max_model_len:  # and what follows in this session
                record.is_too_long = True
                self._end(record)
                continue
            tokens = [] if turn.fresh else tokens.copy()  # the turn before may still be read
            for piece in turn.pieces:
                tokens += token_ids(piece)
            seed = seed_of_length(turn.output_tokens, len(self._records.requests) - 1)
            await self._ask(turn, record, tokens, seed, session.name)
            tokens += [token_by_seed(seed, 0)] * (turn.output_tokens - 1) + [0]

    async def _ask(
        self, turn: Turn, record: RequestRecord, tokens: list[int], seed: int, session: str
    ) -> None:
        length = turn.output_tokens
        room = self._max_model_len - len(tokens)
        most = length if self._known_lengths else min(room, max(length, USUAL_MAX_TOKENS))
        ends = () if self._known_lengths else (0,)
        sampling = SamplingParams(seed=seed, max_tokens=most, stop_token_ids=ends)
        request = GenerateRequest(
            request_id=turn.name,
            prompt_token_ids=tokens,
            work=Work(sampling),
            priority=turn.priority,
            session=session or None,
            speculates=False,
        )
        self.by_name[turn.name] = record
        while True:
            try:
                await self._follow(request, record)
                break
            except OverloadedError as error:
                record.num_refusals += 1
                await asyncio.sleep(error.retry_after_s)
            except PagodaError as error:
                record.error = str(error)
                break
        record.ended = self.now()
        del self.by_name[turn.name]
        self._end(record)

    def _end(self, record: RequestRecord) -> None:
        self._on_done()
        if self._patience is not None:
            self._patience.count(record)
            if self._patience.is_over:
                self._ended.set()

    async def _follow(self, request: GenerateRequest, record: RequestRecord) -> None:
        before = 0.0
        async for chunk in self._generate(request):
            count, now = len(chunk.token_ids), self.now()
            if count:
                if record.first is None:
                    record.first = now
                else:
                    self._records.itl.add((now - before) / count, count)
                before = now
                record.num_output_tokens += count
                record.num_cached_tokens = chunk.num_cached_tokens
            if chunk.finish_reason is FinishReason.ERROR:
                record.error = chunk.error or "The answer ended with an error."
