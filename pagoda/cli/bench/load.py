"""Sending the requests of a benchmark, and when.

Open loop: requests arrive at random at a given rate, however the server fares. Closed loop: a fixed
number are under way, and each that ends makes room for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pagoda.cli.bench.datasets import Sample
from pagoda.cli.bench.metrics import Outcome
from pagoda.cli.openai_client import OpenAIClient, Usage
from pagoda.errors import PagodaError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The times at which requests are sent."""

    request_rate: float
    """Mean arrivals a second; infinity sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the time between two arrivals; 1 is a Poisson process."""
    max_concurrency: int | None
    """The most requests under way; None sets no limit."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """All requests of a run and how long it took."""

    outcomes: Sequence[Outcome]
    duration_s: float


async def run_load(
    client: OpenAIClient,
    samples: Sequence[Sample],
    common: Mapping[str, object],
    schedule: Schedule,
    on_done: Callable[[], None],
) -> Run:
    """Sends every sample, with the body fields `common` added, and waits for all answers."""
    room = _room(schedule.max_concurrency)
    arrivals = arrival_times(len(samples), schedule)
    started = time.perf_counter()

    async def send(sample: Sample) -> Outcome:
        async with room:
            outcome = await _try(client, sample, common)
        on_done()
        return outcome

    tasks = []
    async with asyncio.TaskGroup() as group:
        for sample, arrival in zip(samples, arrivals, strict=True):
            wait = started + arrival - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(send(sample)))
    return Run(
        outcomes=[task.result() for task in tasks],
        duration_s=time.perf_counter() - started,
    )


def arrival_times(count: int, schedule: Schedule) -> list[float]:
    """Seconds from the start at which requests arrive, with gamma-distributed times between them."""
    if math.isinf(schedule.request_rate):
        return [0.0] * count
    rng = random.Random(schedule.seed)
    mean_s = 1 / schedule.request_rate
    now = 0.0
    times = []
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(schedule.burstiness, mean_s / schedule.burstiness)
    return times


async def _try(client: OpenAIClient, sample: Sample, common: Mapping[str, object]) -> Outcome:
    """Like `ask`, but returns a failure as an outcome."""
    sent = time.perf_counter()
    try:
        return await ask(client, sample, common)
    except PagodaError as error:
        return Outcome(sent, time.perf_counter(), error=str(error))


async def ask(client: OpenAIClient, sample: Sample, common: Mapping[str, object]) -> Outcome:
    """Streams one answer and notes when its tokens came.

    Raises:
        ServerError: the server refused the request, reported an error, or hung up early.
        ConfigError: the server cannot be reached.
    """
    body = {
        **common,
        **sample.fields,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    usage: Usage | None = None
    sent = time.perf_counter()
    async for now, answers in client.stream(PATHS[sample.endpoint], body):
        for answer in answers:
            if answer.choices and answer.choices[0].has_output():
                times.append(now)
            usage = answer.usage or usage
    return Outcome(
        sent_s=sent,
        ended_s=time.perf_counter(),
        event_times_s=times,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        output_tokens=usage.completion_tokens if usage else len(times),
    )


def _room(limit: int | None) -> contextlib.AbstractAsyncContextManager[None]:
    return asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
