# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench steps`: the time of steps of one replica, by what is in them, for `pagoda simulate fit`.

Times are those between tokens as they reach the frontend: all that a step costs on this machine is in them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from cyclopts import Parameter

from pagoda.cli import output
from pagoda.cli.files import write_file
from pagoda.cli.options import Count, GeneralOptions
from pagoda.cli.progress import progress
from pagoda.concurrency import event_loop
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.fleet import Fleet
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams

_WARM_STEPS = 4
"""Steps behind the last first token that are not counted."""
_LONG = 4096
"""Tokens of an answer that is ended before."""


class StepSample(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of step and what it takes."""

    num_tokens: int
    num_seqs: int
    context_tokens: int = 0
    """Tokens in front of those that the step computes, of all requests."""
    pairs: float = 0.0
    """Pairs of a token of a prompt and one in front of it."""
    time_s: float
    round_trip_s: float = 0.0
    """Seconds besides from a request to its first token, where that was measured."""


def steps(
    model: str | None = None,
    *,
    output_file: Annotated[Path, Parameter(name="--output")],
    batches: Annotated[tuple[Count, ...], Parameter(consume_multiple=True)] = (
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    ),
    contexts: Annotated[tuple[Count, ...], Parameter(consume_multiple=True)] = (32, 256, 1024),
    prompts: Annotated[tuple[Count, ...], Parameter(consume_multiple=True)] = (16, 64, 256, 1024),
    num_steps: Count = 48,
    engine: EngineOptions = EngineOptions(),
    executor: ExecutorOptions = ExecutorOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Measure steps of one replica: of several requests at once, behind contexts of several lengths, and with
    prompts; write a line of JSON for each kind.

    Args:
        model: The model to load; by default the embedded one.
        output_file: Write the measured steps to this file.
        batches: Numbers of requests that decode at once.
        contexts: Lengths of their contexts in tokens.
        prompts: Lengths of prompts that are computed beside one that decodes.
        num_steps: Steps of each kind.
    """
    general.apply()
    files = executor.resolve(engine, model, ParallelOptions())
    config = executor.engine_config(engine, files.model)
    longest = max(prompts)
    kinds = [*itertools.product(batches, contexts), *((0, length) for length in prompts)]

    async def measure() -> list[StepSample]:
        fleet = Fleet.of_engines(config, "round-robin")
        try:
            await fleet.start()
            limits = fleet.dispatcher.limits
            room = limits.num_blocks * limits.block_size
            bench = _Bench(fleet.dispatcher, limits.vocab_size, num_steps)
            samples = []
            with progress("kinds of steps", len(kinds)) as advance:
                for batch, length in kinds:
                    needed = max(1, batch) * (length + num_steps + 64)
                    if needed <= room and length + num_steps + 64 <= limits.max_model_len:
                        samples.append(
                            await (bench.decode(batch, length) if batch else bench.prompt(length))
                        )
                    advance()
            return samples
        finally:
            await fleet.close()

    samples = event_loop.run(measure())
    write_file(output_file, b"".join(msgspec.json.encode(it) + b"\n" for it in samples), "--output")
    columns = ("requests", "tokens", "context", "time")
    rows = [
        (str(it.num_seqs), str(it.num_tokens), str(it.context_tokens), f"{1000 * it.time_s:.3f} ms")
        for it in samples
    ]
    title = f"Steps of {files.served_name}, prompts up to {longest} tokens"
    output.stdout().print(output.table(title, columns, rows))
    return 0


class _Bench:
    """Requests for one replica that is otherwise idle."""

    def __init__(self, dispatcher: Dispatcher, vocab_size: int, num_steps: int) -> None:
        self._dispatcher = dispatcher
        self._vocab_size = vocab_size
        self._num_steps = num_steps
        self._rng = random.Random(0)
        self._names: Iterator[int] = itertools.count()

    async def decode(self, batch: int, context: int) -> StepSample:
        """A step of `batch` requests that each have `context` tokens and more."""
        streams = [_Stream(self._ask(context)) for _ in range(batch)]
        try:
            await asyncio.gather(*(it.first.wait() for it in streams))
            begin = len(streams[0].times) + _WARM_STEPS
            await streams[0].have(begin + self._num_steps)
            times = streams[0].times[begin : begin + self._num_steps]
            context_tokens = batch * (context + begin + self._num_steps // 2)
        finally:
            await asyncio.gather(*(it.close() for it in streams))
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return StepSample(
            num_tokens=batch,
            num_seqs=batch,
            context_tokens=context_tokens,
            time_s=sum(gaps) / len(gaps),
        )

    async def prompt(self, length: int) -> StepSample:
        """A step that computes a prompt beside a token of another request; the prompt has room in one step."""
        times, trips = [], []
        for _ in range(max(3, self._num_steps // 8)):
            other = _Stream(self._ask(16))
            try:
                await other.have(_WARM_STEPS)
                asked = time.perf_counter()
                stream = _Stream(self._ask(length))
                await stream.first.wait()
                await other.have(len(other.times) + 2)
                await stream.close()
            finally:
                await other.close()
            gaps = [b - a for a, b in itertools.pairwise(other.times) if b > asked]
            times.append(max(gaps))
            trips.append(stream.times[0] - asked - max(gaps) - 1.5 * min(gaps))
        return StepSample(
            num_tokens=length + 1,
            num_seqs=2,
            context_tokens=16 + _WARM_STEPS,
            pairs=length * length / 2,
            time_s=median(times),
            round_trip_s=max(0.0, median(trips)),
        )

    async def _ask(self, num_prompt_tokens: int) -> AsyncIterator[float]:
        """Times of tokens."""
        tokens = [self._rng.randrange(self._vocab_size) for _ in range(num_prompt_tokens)]
        name = f"steps{next(self._names)}"
        work = Work(SamplingParams(seed=1, max_tokens=_LONG, temperature=0.0))
        request = GenerateRequest(request_id=name, prompt_token_ids=tokens, work=work)
        async for chunk in self._dispatcher.generate(request):
            for _ in chunk.token_ids:
                yield time.perf_counter()


class _Stream:
    """Times of the tokens of a request."""

    def __init__(self, tokens: AsyncIterator[float]) -> None:
        self.times: list[float] = []
        self.first = asyncio.Event()
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read(tokens))

    async def _read(self, tokens: AsyncIterator[float]) -> None:
        async for instant in tokens:
            self.times.append(instant)
            self.first.set()
            self._changed.set()

    async def have(self, count: int) -> None:
        """Returns when so many tokens have come."""
        while len(self.times) < count:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
