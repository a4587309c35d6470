# SPDX-License-Identifier: Apache-2.0
"""Routing policies against each other, in virtual time: `python -m benchmarks.routing`.

The dispatcher, the scheduler and the KV cache are the real ones; a step takes the time of a cost model, and its
tokens are made up. Arrivals are Poisson, so they come in bursts; lengths are heavy-tailed. The end of an answer is
a stop token that the dispatcher cannot foresee: it knows `max_tokens` alone, which is the same for all requests.

The load is a share of what one replica finishes when it never runs dry, measured first, so it means the same for
every number of replicas. Every figure is of several seeds; a policy meets the same requests as the others.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.figure import Figure
from pagoda.cli import output
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.policies import POLICIES, PolicyName
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.sim.model import sim_token
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.plugins.simulate.event_loop import run

REPLICAS = (2, 4, 8, 16, 32, 64)
SEEDS = (1, 2, 3)
LOAD = 0.75
MAX_TOKENS = 2048
_VOCABULARY = 2**30
"""Size of a vocabulary in which no stop token is sampled before its place."""
_REQUESTS_PER_REPLICA = 150
_MIN_REQUESTS = 2400
_WARM_UP = 0.1
"""The share of requests at the beginning that fill the system and are not counted."""


@dataclass(frozen=True)
class Timed:
    """A request and when it comes, in seconds from the beginning."""

    at: float
    request: GenerateRequest


@dataclass(frozen=True)
class Outcome:
    """Figures that the clients of one run saw, and hits of the caches."""

    ttfts: list[float]
    """Seconds to the first token, by order of arrival."""
    hit_rate: float
    """The share of prompt tokens that were found cached."""

    def ttft(self, share: float) -> float:
        counted = sorted(self.ttfts[int(_WARM_UP * len(self.ttfts)) :])
        return counted[int(share * (len(counted) - 1))]


Requests = Callable[[random.Random, int], list[GenerateRequest]]
"""Function that draws a number of requests."""


# ---- traffic


def heavy_tailed(rng: random.Random, count: int) -> list[GenerateRequest]:
    """Prompts with a Pareto tail, a few a hundred times as long as most; log-normal answers; nothing shared."""
    return [
        _request(rng, index, _unique(rng, min(32_000, int(rng.paretovariate(1.3) * 200))))
        for index in range(count)
    ]


def shared_prefixes(rng: random.Random, count: int, *, groups: int = 96) -> list[GenerateRequest]:
    """Prompts that begin with one of several long texts, some of which are more popular, and end on their own."""
    texts = [_unique(rng, int(_log_normal(rng, 2000, 0.4))) for _ in range(groups)]
    popularity = [1 / (rank + 1) ** 0.6 for rank in range(groups)]
    chosen = rng.choices(range(groups), popularity, k=count)
    return [
        _request(rng, index, texts[group] + _unique(rng, int(_log_normal(rng, 150, 0.8)) + 1))
        for index, group in enumerate(chosen)
    ]


def _unique(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(length)]


def _log_normal(rng: random.Random, mean: float, sigma: float) -> float:
    """`sigma` is that of the logarithm."""
    return mean * rng.lognormvariate(-sigma * sigma / 2, sigma)


def _request(rng: random.Random, index: int, prompt: list[int]) -> GenerateRequest:
    seed = rng.randrange(2**62)
    last = prompt[-1]
    for position in range(min(MAX_TOKENS, max(1, int(_log_normal(rng, 60, 1.0))))):
        last = sim_token(seed, position, last, _VOCABULARY)
    sampling = SamplingParams(seed=seed, max_tokens=MAX_TOKENS, stop_token_ids=(last,))
    return GenerateRequest(request_id=f"r{index}", prompt_token_ids=prompt, work=Work(sampling))


# ---- runs


def replica(num_blocks: int = 16384) -> EngineConfig:
    """A model of about 8 billion parameters on one accelerator: 10 ms a step and 20,000 prompt tokens a second."""
    return EngineConfig(
        worker=WorkerConfig(model="sim"),
        executor="sim",
        sim=SimConfig(
            base_s=0.010, per_token_s=50e-6, num_blocks=num_blocks, vocab_size=_VOCABULARY
        ),
        max_num_waiting=1_000_000,
        max_num_waiting_tokens=2**40,
    )


def serve(
    traffic: Sequence[Timed], policy: PolicyName, num_replicas: int, engine: EngineConfig
) -> Outcome:
    """Runs `traffic` through a dispatcher until the last answer is complete."""
    return run(_serve(traffic, policy, num_replicas, engine))


async def _serve(
    traffic: Sequence[Timed], policy: PolicyName, num_replicas: int, engine: EngineConfig
) -> Outcome:
    dispatcher = Dispatcher(
        [SimEngine(engine).replica for _ in range(num_replicas)], POLICIES[policy]
    )
    await dispatcher.start()
    loop = asyncio.get_running_loop()

    async def ask(timed: Timed) -> float:
        first = 0.0
        async for chunk in dispatcher.generate(timed.request):
            if chunk.token_ids:
                first = first or loop.time()
        return first - timed.at

    answers = []
    for timed in traffic:
        await asyncio.sleep(timed.at - loop.time())
        answers.append(asyncio.create_task(ask(timed)))
    ttfts = await asyncio.gather(*answers)
    load = await dispatcher.load()
    await dispatcher.close()
    return Outcome(ttfts, load.num_prefix_hit_tokens / load.num_prompt_tokens)


def capacity(requests: Requests, engine: EngineConfig, *, count: int = 1000) -> float:
    """Requests a second of one replica that always has enough to do, from a run of `count`."""
    drawn = requests(random.Random(0), count)
    return run(_capacity(drawn, engine))


async def _capacity(requests: Sequence[GenerateRequest], engine: EngineConfig) -> float:
    """Rate until nine tenths are finished: from then on the replica runs dry."""
    dispatcher = Dispatcher([SimEngine(engine).replica], POLICIES["round-robin"])
    await dispatcher.start()
    loop = asyncio.get_running_loop()
    finished: list[float] = []

    async def ask(request: GenerateRequest) -> None:
        async for _ in dispatcher.generate(request):
            pass
        finished.append(loop.time())

    await asyncio.gather(*map(ask, requests))
    await dispatcher.close()
    counted = len(finished) * 9 // 10
    return counted / finished[counted - 1]


def poisson(requests: Requests, seed: int, count: int, rate: float) -> list[Timed]:
    """`rate` requests a second, at instants that know nothing of each other."""
    rng = random.Random(seed)
    at = 0.0
    traffic = []
    for request in requests(rng, count):
        at += rng.expovariate(rate)
        traffic.append(Timed(at, request))
    return traffic


# ---- figures


def prefix_affinity_figures(seeds: Sequence[int], *, num_requests: int = 2400) -> list[Figure]:
    """Four replicas, none of which has room for a third of the shared texts besides what it is working on."""
    engine = replica(num_blocks=4096)
    rate = 4 * LOAD * capacity(shared_prefixes, engine)
    outcomes = _compare(
        ("round-robin", "prefix-affinity"),
        [poisson(shared_prefixes, seed, num_requests, rate) for seed in seeds],
        4,
        engine,
    )
    even, affine = outcomes
    hits = [fmean(outcome.hit_rate for outcome in runs) for runs in outcomes]
    tails = [fmean(outcome.ttft(0.99) for outcome in runs) for runs in outcomes]
    return [
        Figure(
            what=f"prefix affinity against round robin, dp 4, {len(seeds)} seeds: hit rate",
            measured=f"{hits[1]:.1%} against {hits[0]:.1%}: {hits[1] / hits[0]:.2f} ×",
            target="≥ 1.5 ×",
            command="python -m benchmarks.routing prefix-affinity",
        ),
        Figure(
            what="the same: TTFT p99",
            measured=f"{_ms(tails[1])} against {_ms(tails[0])}; worst seed {_worst(affine, even):.2f} ×",
            target="no worse",
            command="python -m benchmarks.routing prefix-affinity",
        ),
    ]


def least_pending_figures(seeds: Sequence[int], sizes: Sequence[int] = REPLICAS) -> list[Figure]:
    """Few prompts are many times as long as most, and nothing is shared."""
    engine = replica()
    rate = LOAD * capacity(heavy_tailed, engine)
    return [_least_pending(seeds, size, rate * size, engine) for size in sizes]


def _least_pending(seeds: Sequence[int], size: int, rate: float, engine: EngineConfig) -> Figure:
    count = max(_MIN_REQUESTS, _REQUESTS_PER_REPLICA * size)
    traffic = [poisson(heavy_tailed, seed, count, rate) for seed in seeds]
    even, least = _compare(("round-robin", "least-pending-tokens"), traffic, size, engine)
    tails = [fmean(outcome.ttft(0.99) for outcome in runs) for runs in (even, least)]
    return Figure(
        what=f"least pending tokens against round robin, dp {size}, {len(seeds)} seeds: TTFT p99",
        measured=(
            f"{_ms(tails[1])} against {_ms(tails[0])}: {tails[1] / tails[0]:.2f} × "
            f"(seeds up to {_worst(least, even):.2f})"
        ),
        target="≤ 0.5 ×",
        command=f"python -m benchmarks.routing least-pending-tokens --replicas {size}",
    )


def _compare(
    policies: Sequence[PolicyName],
    traffic: Sequence[Sequence[Timed]],
    num_replicas: int,
    engine: EngineConfig,
) -> list[list[Outcome]]:
    """Outcomes of all seeds, by policy."""
    return [[serve(one, policy, num_replicas, engine) for one in traffic] for policy in policies]


def _worst(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> float:
    return max(a.ttft(0.99) / b.ttft(0.99) for a, b in zip(ours, theirs, strict=True))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


def main() -> None:
    """Runs the comparisons named, by default both."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ("prefix-affinity", "least-pending-tokens")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--replicas", nargs="+", type=int, default=REPLICAS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no comparison {unknown[0]}; there are {', '.join(names)}")
    chosen = arguments.names or names
    figures: list[Figure] = []
    if "prefix-affinity" in chosen:
        figures += prefix_affinity_figures(arguments.seeds)
    if "least-pending-tokens" in chosen:
        figures += least_pending_figures(arguments.seeds, arguments.replicas)
    rows = [(f.what, f.measured, f.target, f.command) for f in figures]
    output.stdout().print(output.table("", ("what", "measured", "target", "command"), rows))


if __name__ == "__main__":
    main()
