# SPDX-License-Identifier: Apache-2.0
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
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.cli.answer import RequestTimes, ask
from pagoda.cli.openai_client import PATHS, OpenAIClient
from pagoda.cli.options import Count, Length
from pagoda.errors import PagodaError
from pagoda.plugins.bench.datasets import Sample


@Parameter(name="*", group=Group("Load", sort_key=20))
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The times at which requests are sent, and the limits of a good answer."""

    request_rate: Annotated[float, Parameter(validator=Number(gt=0))] = math.inf
    """Arrivals a second (open loop); by default all requests are ready at once."""
    burstiness: Annotated[float, Parameter(validator=Number(gt=0))] = 1.0
    """1 is a Poisson process; below 1 requests come in bursts, above 1 more evenly."""
    max_concurrency: Annotated[
        Count | None, Parameter(name=["--max-concurrency", "--concurrency"])
    ] = None
    """The most requests under way (closed loop)."""
    stream: bool = True
    """Take answers as streams; --no-stream takes each in one piece, of which only the time to its end is known."""
    num_warmups: Length = 1
    """Requests sent before the clock starts."""
    goodput: Annotated[
        tuple[str, ...], Parameter(consume_multiple=True, negative=(), show_default=False)
    ] = ()
    """Limits in ms such as ttft:200 tpot:50 e2el:3000; requests that keep them are goodput."""
    seed: int = 0
    """Seed of random prompts and arrivals."""


async def run_load(
    client: OpenAIClient,
    samples: Sequence[Sample],
    common: Mapping[str, object],
    load: LoadOptions,
    on_done: Callable[[], None] = lambda: None,
) -> tuple[list[RequestTimes], float]:
    """Sends every sample, with the body fields `common` added; returns how all fared, and the seconds it took."""
    limit = load.max_concurrency
    room = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
    arrivals = arrival_times(len(samples), load)
    started = time.perf_counter()

    async def send(sample: Sample, arrival: float) -> RequestTimes:
        async with room:  # arrivals are in order, so nobody waits behind one that is still to come
            await asyncio.sleep(started + arrival - time.perf_counter())
            sent = time.perf_counter()
            try:
                outcome = await ask_sample(client, sample, common, stream=load.stream)
            except PagodaError as error:
                outcome = RequestTimes(sent, time.perf_counter(), error=str(error))
        on_done()
        return outcome

    outcomes = await asyncio.gather(*map(send, samples, arrivals))
    return outcomes, time.perf_counter() - started


async def ask_sample(
    client: OpenAIClient, sample: Sample, common: Mapping[str, object], *, stream: bool = True
) -> RequestTimes:
    """Raises what `ask` raises."""
    return await ask(client, PATHS[sample.endpoint], {**common, **sample.fields}, stream=stream)


def arrival_times(count: int, load: LoadOptions) -> list[float]:
    """Seconds from the start at which requests arrive, with gamma-distributed times between them."""
    if math.isinf(load.request_rate):
        return [0.0] * count
    rng = random.Random(load.seed)
    mean_s = 1 / load.request_rate
    now = 0.0
    times = []
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(load.burstiness, mean_s / load.burstiness)
    return times
