# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench steps`: the time of steps of one replica, by what is in them, for `pagoda simulate fit`.

A step's time is that in which the worker is busy; what the engine and this process, the frontend, take of the
processor is measured besides, so that a simulation can let all of them share a machine's cores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import psutil
from cyclopts import Parameter

from pagoda.checkpoints.resolve import load_model_config
from pagoda.cli import output
from pagoda.cli.files import check_writable, write_file
from pagoda.cli.options import Count, GeneralOptions
from pagoda.cli.progress import progress
from pagoda.concurrency import event_loop
from pagoda.errors import ConfigError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.fleet import Fleet
from pagoda.ipc.machine import available_cores
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.frontend import EngineReady, GenerateRequest, Work
from pagoda.messages.load import LoadReport
from pagoda.messages.sampling_params import SamplingParams

_WARM_STEPS = 4
"""Steps behind the last first token that are not counted."""
_LONG = 4096
"""Tokens of an answer that is ended before."""
_LEFT = 64
"""Tokens of an answer for which there is room besides."""
_BLOCK_SIZE = 16
_NUM_PROMPTS = 8
"""Prompts of one measurement."""


class StepSample(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of step and what it takes: means."""

    num_tokens: float
    num_seqs: float
    num_requests: float = 0.0
    """Requests whose prompts are computed."""
    context_tokens: float = 0.0
    """Tokens in front of those that the step computes, of all requests."""
    pairs: float = 0.0
    """Pairs of a token of a prompt and one in front of it."""
    time_s: float
    """Seconds in which the worker is busy."""
    engine_s: float
    """Processor seconds of the engine."""
    frontend_s: float
    """Processor seconds of the frontend."""
    round_trip_s: float = 0.0
    """Seconds from a request to its first token in which no process works, where that was measured."""
    worker_s: float = 0.0
    """Processor seconds of the worker."""
    replicas: int = 1
    """Replicas that compute such steps at once; seconds are those of a step of each."""
    cores: int
    """Cores that all have."""
    threads: int
    """Threads of the worker."""
    gaps_s: list[float] = []
    """Seconds between single steps that are of one kind."""


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
    replicas: Annotated[tuple[Count, ...], Parameter(consume_multiple=True)] = (),
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
        prompts: Lengths of prompts that are computed alone, beside one request that decodes, and beside many.
        replicas: Numbers of replicas that also compute at once, behind the first of --contexts, to measure how
            much they slow each other down; such as 2 4 for replicas of one thread on two cores.
        num_steps: Steps of each kind.
        rounds: Measure all kinds so many times, and take the median of each.
    """
    general.apply()
    check_writable(output_file, "--output")
    kinds = [_Kind(batch, context) for batch in batches for context in contexts]
    beside = (0, 1, max(batches) // 2)
    kinds += [_Kind(batch, 16, length) for batch in beside for length in prompts]
    files = executor.resolve(engine, model, ParallelOptions())
    longest = _LONG
    if executor.executor != "sim":
        longest = load_model_config(files.model, engine.load_format).max_position_embeddings
    engine = _with_few_blocks(engine, kinds, num_steps, longest)
    threads = engine.threads or available_cores()

    async def measure() -> list[StepSample]:
        async with AsyncExitStack() as stack:
            benches: dict[int, _Bench] = {}
            for count in sorted({1, *replicas}):
                parallel = ParallelOptions(data_parallel_size=count)
                config = executor.engine_config(engine, files.model, parallel)
                fleet = Fleet.of_engines(config, "round-robin")
                stack.push_async_callback(fleet.close)
                await fleet.start()
                benches[count] = _Bench(fleet.dispatcher, num_steps, threads, count)
            limits = benches[1].limits
            fitting = [it for it in kinds if it.has_room(limits, num_steps)]
            if not fitting:
                raise ConfigError(
                    "--num-kv-blocks: no kind of steps fits the KV cache and the model's length; name shorter "
                    "--contexts or --prompts."
                )
            together = [it for it in fitting if it.decodes_behind(contexts[0])]
            # The one that touches most of it.
            largest = max(fitting, key=lambda it: it.batch * it.context)
            for count, bench in benches.items():
                await bench.measure(largest if count == 1 else together[0])
            # Machines get faster and slower: what is compared is measured in turn.
            each = [(kind, 1) for kind in fitting]
            each += [(kind, count) for kind in together for count in benches if count > 1]
            each.sort(key=lambda it: fitting.index(it[0]))
            found: dict[tuple[_Kind, int], list[StepSample]] = {it: [] for it in each}
            with progress("kinds of steps", rounds * len(each)) as advance:
                for kind, count in each * rounds:
                    found[kind, count].append(await benches[count].measure(kind))
                    advance()
            medians = [sorted(it, key=lambda it: it.time_s) for it in found.values()]
            return sorted((it[(rounds - 1) // 2] for it in medians), key=lambda it: it.replicas)

    samples = event_loop.run(measure())
    write_file(output_file, b"".join(msgspec.json.encode(it) + b"\n" for it in samples), "--output")
    columns = ("replicas", "requests", "tokens", "context", "worker", "engine", "frontend")
    rows = [
        (
            f"{one.replicas}",
            *(f"{it:.1f}" for it in (one.num_seqs, one.num_tokens, one.context_tokens)),
            *(f"{1000 * it:.3f} ms" for it in (one.worker_s, one.engine_s, one.frontend_s)),
        )
        for one in samples
    ]
    title = f"Steps of {files.served_name}"
    output.stdout().print(output.table(title, columns, rows))
    return 0


def _with_few_blocks(
    engine: EngineOptions, kinds: Sequence[_Kind], num_steps: int, longest: int
) -> EngineOptions:
    """A KV cache and sequences just large enough, unless their sizes are given; a model can do `longest` tokens.

    Blocks are used in turn, and memory that nobody has touched before is slow: not that of a replica that has run
    for a while.
    """
    if engine.num_kv_blocks is not None:
        return engine
    block_size = engine.block_size or _BLOCK_SIZE
    needed = max(it.longest(num_steps) for it in kinds) + _LONG
    length = engine.max_model_len or min(longest, needed)
    num_blocks = max(it.num_blocks(num_steps, block_size) for it in kinds)
    return dataclasses.replace(
        engine, max_model_len=length, num_kv_blocks=max(num_blocks, -(-length // block_size))
    )


class _Kind(NamedTuple):
    """A kind of steps."""

    batch: int
    """Requests that decode."""
    context: int
    """Tokens in front of each."""
    prompt: int = 0
    """Tokens of a prompt in the same step."""

    def longest(self, num_steps: int) -> int:
        """Tokens of the longest sequence of such steps."""
        return max(self.context + 2 * num_steps, self.prompt) + _LEFT

    def num_blocks(self, num_steps: int, block_size: int) -> int:
        """Blocks of KV that such steps take at most."""
        decoded = self.context + 2 * num_steps + _LEFT
        return self.batch * -(-decoded // block_size) + -(-(self.prompt + _LEFT) // block_size)

    def decodes_behind(self, context: int) -> bool:
        """True for steps that decode behind so many tokens, or beside a prompt."""
        return self.batch > 0 and (self.prompt > 0 or self.context == context)

    def has_room(self, limits: EngineReady, num_steps: int) -> bool:
        """True if the replica's KV cache has room for such steps."""
        longest = self.longest(num_steps)
        num_blocks = self.num_blocks(num_steps, limits.block_size)
        return longest <= limits.max_model_len and num_blocks <= limits.num_blocks


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


class _Used(NamedTuple):
    """An instant, and processor seconds that processes have taken until then."""

    at: float
    engine_s: float
    worker_s: float
    frontend_s: float

    def per_step(self, before: _Used, count: int) -> _Used:
        """Seconds of each of `count` steps since `before`."""
        return _Used(*((end - begin) / count for end, begin in zip(self, before, strict=True)))


class _Bench:
    """Requests for replicas that are otherwise idle: one, but for steps that only decode."""

    def __init__(self, dispatcher: Dispatcher, num_steps: int, threads: int, replicas: int) -> None:
        self._dispatcher = dispatcher
        self.limits = dispatcher.limits
        self._num_steps = num_steps
        self._threads = threads
        self._replicas = replicas
        self._rng = random.Random(0)
        self._names: Iterator[int] = itertools.count()

    async def measure(self, kind: _Kind) -> StepSample:
        """A step of this kind."""
        streams = [self._stream(kind.context) for _ in range(kind.batch * self._replicas)]
        try:
            await asyncio.gather(*(it.first.wait() for it in streams))
            if not streams:
                return await self._prompts_alone(kind)
            await streams[0].have(len(streams[0].times) + _WARM_STEPS)
            return await self._decode(kind, streams[0])
        finally:
            await asyncio.gather(*(it.close() for it in streams))

    async def _decode(self, kind: _Kind, stream: _Stream) -> StepSample:
        """Steps of requests that decode, and of a few prompts beside them."""
        num_prompts = _NUM_PROMPTS if kind.prompt else 0
        before = await self._dispatcher.load()
        await stream.have(len(stream.times) + 1)
        first, begin = len(stream.times), _used(before)
        for _ in range(num_prompts):
            each = [self._request(kind.prompt, 1) for _ in range(self._replicas)]
            await asyncio.gather(*(_last(self._dispatcher, it) for it in each))
            await stream.have(len(stream.times) + 1)
        await stream.have(max(first + self._num_steps, len(stream.times)))
        count, end = len(stream.times) - first, _used(before)
        after = await self._dispatcher.load()
        num_steps = after.num_steps - before.num_steps
        idle_s = (after.steps.idle_s - before.steps.idle_s) / num_steps
        # All replicas have computed as many steps.
        used = end.per_step(begin, count)
        share = num_prompts / count
        gaps = _gaps(stream.times[first - 1 :])
        return StepSample(
            num_tokens=kind.batch + share * kind.prompt,
            num_seqs=kind.batch + share,
            num_requests=share,
            context_tokens=kind.batch * (kind.context + first + count / 2),
            pairs=share * kind.prompt**2 / 2,
            time_s=used.at - idle_s,
            engine_s=used.engine_s / self._replicas,
            worker_s=used.worker_s / self._replicas,
            frontend_s=used.frontend_s / self._replicas,
            replicas=self._replicas,
            cores=available_cores(),
            threads=self._threads,
            gaps_s=[] if num_prompts or self._replicas > 1 else gaps,
        )

    async def _prompts_alone(self, kind: _Kind) -> StepSample:
        """Steps of one prompt each, which wait for each other's answers."""
        warm, *requests = [self._request(kind.prompt, 1) for _ in range(1 + _NUM_PROMPTS)]
        await _last(self._dispatcher, warm)
        at = time.perf_counter()  # the worker has been idle since
        before = await self._dispatcher.load()
        begin, taken = _used(before), 0.0
        for request in requests:
            asked = time.perf_counter()
            await _last(self._dispatcher, request)
            taken += time.perf_counter() - asked
        end, count = _used(before), len(requests)
        idle_s = (await self._dispatcher.load()).steps.idle_s - before.steps.idle_s
        time_s, used = (end.at - at - idle_s) / count, end.per_step(begin, count)
        waited_s = taken / count - time_s - used.engine_s - used.frontend_s
        return StepSample(
            num_tokens=kind.prompt,
            num_seqs=1,
            num_requests=1,
            pairs=kind.prompt**2 / 2,
            time_s=time_s,
            engine_s=used.engine_s,
            worker_s=used.worker_s,
            frontend_s=used.frontend_s,
            round_trip_s=max(0.0, waited_s),
            cores=available_cores(),
            threads=self._threads,
        )

    def _request(self, num_prompt_tokens: int, max_tokens: int) -> GenerateRequest:
        tokens = [self._rng.randrange(self.limits.vocab_size) for _ in range(num_prompt_tokens)]
        work = Work(SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0))
        name = f"steps{next(self._names)}"
        return GenerateRequest(
            request_id=name, prompt_token_ids=tokens, work=work, speculates=False
        )

    def _stream(self, num_prompt_tokens: int) -> _Stream:
        return _Stream(_times(self._dispatcher, self._request(num_prompt_tokens, _LONG)))


async def _times(dispatcher: Dispatcher, request: GenerateRequest) -> AsyncIterator[float]:
    """Times of tokens."""
    async for chunk in dispatcher.generate(request):
        for _ in chunk.token_ids:
            yield time.perf_counter()


async def _last(dispatcher: Dispatcher, request: GenerateRequest) -> None:
    """Returns with the last token."""
    async for _ in dispatcher.generate(request):
        pass


def _used(report: LoadReport) -> _Used:
    """Processor seconds of the processes in `report`, and of this one."""
    engines, workers = (
        sum(_processor_s(it.pid) for it in report.processes if it.role.startswith(role))
        for role in ("engine", "worker")
    )
    return _Used(time.perf_counter(), engines, workers, time.process_time())


def _processor_s(pid: int) -> float:
    """Processor seconds of a process, to the nanosecond where Linux tells them (clock_getcpuclockid(3))."""
    if sys.platform == "linux":
        return time.clock_gettime(~pid << 3 | 2)
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class _Stream:
    """Times of the tokens of a request."""

    def __init__(self, tokens: AsyncIterator[float]) -> None:
        self.times: list[float] = []
        self.first = asyncio.Event()
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read(tokens))

    async def _read(self, tokens: AsyncIterator[float]) -> None:
        try:
            async for instant in tokens:
                self.times.append(instant)
                self.first.set()
                self._changed.set()
        finally:
            self.first.set()
            self._changed.set()

    async def have(self, count: int) -> None:
        """Returns when so many tokens have come. Raises ConfigError: the answer has ended before."""
        while len(self.times) < count:
            if self._reading.done():
                raise ConfigError(
                    "--max-model-len: an answer has ended before its steps were measured; raise it."
                )
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
