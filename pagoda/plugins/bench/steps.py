# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench steps`: the time of steps of one replica, by what is in them, for `pagoda simulate fit`.

Times are those between tokens as they reach the frontend: all that a step costs on this machine is in them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

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
from pagoda.messages.frontend import EngineReady, GenerateRequest, Work
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
    rounds: Count = 3,
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
        prompts: Lengths of prompts that are computed beside one request that decodes, and beside many.
        num_steps: Steps of each kind.
        rounds: Measure all kinds so many times, and take the median of each.
    """
    general.apply()
    files = executor.resolve(engine, model, ParallelOptions())
    config = executor.engine_config(engine, files.model)
    kinds = [_Kind(batch, context) for batch in batches for context in contexts]
    kinds += [_Kind(batch, 16, length) for batch in (1, max(batches) // 2) for length in prompts]

    async def measure() -> list[StepSample]:
        fleet = Fleet.of_engines(config, "round-robin")
        try:
            await fleet.start()
            limits = fleet.dispatcher.limits
            fitting = [it for it in kinds if it.has_room(limits, num_steps)]
            bench = _Bench(fleet.dispatcher, limits.vocab_size, num_steps)
            found: dict[_Kind, list[StepSample]] = {kind: [] for kind in fitting}
            with progress("kinds of steps", rounds * len(fitting)) as advance:
                for kind in fitting * rounds:
                    found[kind].append(await bench.measure(kind))
                    advance()
            return [sorted(it, key=lambda it: it.time_s)[rounds // 2] for it in found.values()]
        finally:
            await fleet.close()

    samples = event_loop.run(measure())
    write_file(output_file, b"".join(msgspec.json.encode(it) + b"\n" for it in samples), "--output")
    columns = ("requests", "tokens", "context", "time")
    rows = [
        (str(it.num_seqs), str(it.num_tokens), str(it.context_tokens), f"{1000 * it.time_s:.3f} ms")
        for it in samples
    ]
    title = f"Steps of {files.served_name}"
    output.stdout().print(output.table(title, columns, rows))
    return 0


class _Kind(NamedTuple):
    """A kind of steps."""

    batch: int
    """Requests that decode."""
    context: int
    """Tokens in front of each."""
    prompt: int = 0
    """Tokens of a prompt in the same step."""

    def has_room(self, limits: EngineReady, num_steps: int) -> bool:
        """True if the replica's KV cache has room for such steps."""
        longest = max(self.context, self.prompt) + 2 * num_steps + 64
        blocks = (self.batch + 1) * -(-longest // limits.block_size)
        return longest <= limits.max_model_len and blocks <= limits.num_blocks


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


class _Bench:
    """Requests for one replica that is otherwise idle."""

    def __init__(self, dispatcher: Dispatcher, vocab_size: int, num_steps: int) -> None:
        self._dispatcher = dispatcher
        self._vocab_size = vocab_size
        self._num_steps = num_steps
        self._rng = random.Random(0)
        self._names: Iterator[int] = itertools.count()

    async def measure(self, kind: _Kind) -> StepSample:
        """A step of this kind."""
        streams = [_Stream(self._ask(kind.context)) for _ in range(kind.batch)]
        try:
            await asyncio.gather(*(it.first.wait() for it in streams))
            await streams[0].have(len(streams[0].times) + _WARM_STEPS)
            if kind.prompt:
                return await self._with_prompt(kind, streams[0])
            return await self._decode(kind, streams[0])
        finally:
            await asyncio.gather(*(it.close() for it in streams))

    async def _decode(self, kind: _Kind, stream: _Stream) -> StepSample:
        begin = len(stream.times)
        await stream.have(begin + self._num_steps)
        return StepSample(
            num_tokens=kind.batch,
            num_seqs=kind.batch,
            context_tokens=kind.batch * (kind.context + begin + self._num_steps // 2),
            time_s=median(_gaps(stream.times[begin:])),
        )

    async def _with_prompt(self, kind: _Kind, other: _Stream) -> StepSample:
        """The longest gap between tokens of others is the step with the prompt, which has room in one step."""
        times, trips = [], []
        for _ in range(3):
            begin, asked = len(other.times) - 1, time.perf_counter()
            stream = _Stream(self._ask(kind.prompt))
            await stream.first.wait()
            await other.have(len(other.times) + 2)
            await stream.close()
            gaps = _gaps(other.times[begin:])
            times.append(max(gaps))
            # It comes in the middle of a step, and the next one is planned.
            trips.append(stream.times[0] - asked - max(gaps) - 1.5 * min(gaps))
        return StepSample(
            num_tokens=kind.prompt + kind.batch,
            num_seqs=1 + kind.batch,
            context_tokens=kind.batch * (kind.context + len(other.times)),
            pairs=kind.prompt**2 / 2,
            time_s=median(times),
            round_trip_s=max(0.0, median(trips)),
        )

    async def _ask(self, num_prompt_tokens: int) -> AsyncIterator[float]:
        """Times of tokens."""
        tokens = [self._rng.randrange(self._vocab_size) for _ in range(num_prompt_tokens)]
        name = f"steps{next(self._names)}"
        work = Work(SamplingParams(seed=1, max_tokens=_LONG, temperature=0.0))
        request = GenerateRequest(
            request_id=name, prompt_token_ids=tokens, work=work, speculates=False
        )
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
