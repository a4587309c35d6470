# SPDX-License-Identifier: Apache-2.0
"""The cost of large fleets for a dispatcher (`python -m benchmarks.dispatch_scale`).

Replicas answer nothing by themselves, so that the figures are those of the dispatcher alone: placing a request and
taking it off its replica again, judging replicas that are all busy, and hosts that join.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from benchmarks.figure import Figure
from pagoda.api.catalogue import Catalogue, NamedModel, ServedModel
from pagoda.cli import output
from pagoda.concurrency.async_utils import cancel_all
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.policies import POLICIES, PolicyName
from pagoda.fleet.replica import Replica
from pagoda.messages.frontend import (
    AbortRequests,
    EngineReady,
    FrontendMessage,
    GenerateRequest,
    RequestRefused,
    TokenChunk,
    TokenChunks,
    Work,
)
from pagoda.messages.load import LoadReport
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker
from pagoda.telemetry.tracer import Tracer
from pagoda.text.model_text import synthetic_model_text
from pagoda.text.text_generator import TextGenerator

SIZES = (10, 100, 1_000, 10_000)
_POOLS = ((1, 100), (10, 100), (100, 100))
"""Numbers of pools, and of hosts in each."""
_NUM_REQUESTS = 2_000
_LIMITS = EngineReady(
    max_model_len=2**15,
    vocab_size=2**17,
    num_blocks=2**14,
    block_size=16,
    max_num_seqs=256,
    max_num_waiting=1024,
    max_num_waiting_tokens=2**30,
    summary="a host of a benchmark",
)


class StaticPeer:
    """The peer of a replica, which takes requests and sends what it is told to."""

    def __init__(self, name: str) -> None:
        self.replica = Replica(self, "the engine", Tracer("frontend"), name=name)
        self.replica.receive(_LIMITS)
        self.requests: dict[str, GenerateRequest] = {}
        """Running requests by their wire ids."""
        self.refuses = False
        self.num_refused = 0

    def enter(self, state: ReplicaState) -> None:
        if state is ReplicaState.STARTING:
            self.replica.lose("The engine ended.")
        elif state is ReplicaState.DEGRADED:
            self.replica.receive(LoadReport(is_worker_ready=False))
        else:
            self.replica.receive(_LIMITS)

    def send_token(self) -> None:
        """Sends a token to each request."""
        self.replica.receive(TokenChunks([TokenChunk(wire_id, [1]) for wire_id in self.requests]))

    def send(self, message: FrontendMessage) -> None:
        if isinstance(message, GenerateRequest):
            if self.refuses:
                self.num_refused += 1
                self.replica.receive(RequestRefused(message.wire_id, retry_after_s=3))
            else:
                self.requests[message.wire_id] = message
        elif isinstance(message, AbortRequests):
            for wire_id in message.request_ids:
                del self.requests[wire_id]

    async def start(self) -> None:
        """The peer is ready from its construction on."""

    async def close(self) -> None:
        """Nothing is to be ended."""


def request(number: int, num_prompt_tokens: int = 512) -> GenerateRequest:
    """One of 64 prompts, each with an end of its own."""
    group = number % 64
    prompt = [group] * (num_prompt_tokens - 32) + [number] * 32
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=prompt,
        work=Work(SamplingParams(seed=1, max_tokens=64)),
        session=f"s{number % 1024}",
    )


def fleet(size: int, policy: PolicyName) -> tuple[Dispatcher, list[StaticPeer]]:
    """A dispatcher of `size` replicas."""
    dispatcher = Dispatcher([], POLICIES[policy])
    peers = [StaticPeer(f"host{number}:1") for number in range(size)]
    for peer in peers:
        dispatcher.add(peer.replica)
    return dispatcher, peers


async def begin(dispatcher: Dispatcher, asked: GenerateRequest) -> asyncio.Task[None]:
    """Places a request, which runs until it is cancelled."""

    async def read() -> None:
        async for _ in dispatcher.generate(asked):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    return reading


async def place_one(dispatcher: Dispatcher, number: int) -> None:
    """Places a request and takes it off again."""
    await cancel_all([await begin(dispatcher, request(number))])


async def dispatch_s(size: int, policy: PolicyName) -> float:
    """Seconds for one request, with an eighth as many requests running as there are replicas."""
    dispatcher, _ = fleet(size, policy)
    readings = [await begin(dispatcher, request(10**6 + number)) for number in range(size // 8)]
    began = time.perf_counter()
    for number in range(_NUM_REQUESTS):
        await place_one(dispatcher, number)
    duration_s = time.perf_counter() - began
    await cancel_all(readings)
    await dispatcher.close()
    return duration_s / _NUM_REQUESTS


def catalogue(num_pools: int, hosts_per_pool: int) -> Catalogue:
    """Models of as many pools, each of which falls back on the next one."""
    names = [f"pool{number}" for number in range(num_pools)]
    text = synthetic_model_text()
    served = []
    for number, name in enumerate(names):
        dispatcher, _ = fleet(hosts_per_pool, "prefix-affinity")
        generator = TextGenerator(dispatcher, text, RequestTracker(), name=name)
        after = names[(number + 1) % num_pools]
        model = NamedModel(name, lambda: text, aliases=(f"{name}-alias",), fallback=(after,))
        served.append(ServedModel(model, generator, dispatcher))
    return Catalogue(served, {"mixed": dict.fromkeys(names[:2], 1.0)})


async def place_by_name(models: Catalogue, number: int) -> None:
    """Finds the model of a request by one of its names, places the request, and takes it off again."""
    asked = request(number)
    client = ClientRequest(id=asked.request_id, arrived_ns=0)
    found = models.find(f"pool{number % len(models.models)}-alias", client)
    if found is None:
        raise RuntimeError("The benchmark has asked for a model that it has not made.")
    served = models.choose(found[0], client)
    await cancel_all([await begin(served.dispatcher, asked)])


async def pools_s(num_pools: int, hosts_per_pool: int) -> float:
    """Seconds for one request that names one of many models."""
    models = catalogue(num_pools, hosts_per_pool)
    began = time.perf_counter()
    for number in range(_NUM_REQUESTS):
        await place_by_name(models, number)
    duration_s = time.perf_counter() - began
    for served in models.models.values():
        await served.dispatcher.close()
    return duration_s / _NUM_REQUESTS


async def judging_s(size: int = 1_000, *, per_replica: int = 4) -> float:
    """Seconds to judge busy replicas once: each has requests that have just got on."""
    dispatcher, peers = fleet(size, "round-robin")
    numbers = range(size * per_replica)
    readings = [await begin(dispatcher, request(number, 64)) for number in numbers]
    for peer in peers:
        peer.send_token()
    for _ in range(3):
        await asyncio.sleep(0)
    for slot in dispatcher.slots:
        for _ in range(20):  # steps long enough to be compared
            slot.health.progress("r", 1, slot.health.heard_at, 0.1)
    durations = []
    for _ in range(5):
        began = time.perf_counter()
        dispatcher.slots.judge()
        durations.append(time.perf_counter() - began)
    await cancel_all(readings)
    await dispatcher.close()
    return min(durations)


async def joins_s(size: int = 5_000) -> float:
    """Seconds to take in so many hosts."""
    router = PrefillDecodeRouter(POLICIES["prefix-affinity"])
    peers = [StaticPeer(f"host{number}:1") for number in range(size)]
    began = time.perf_counter()
    for peer in peers:
        router.add(peer.replica)
    duration_s = time.perf_counter() - began
    await router.close()
    return duration_s


def figures(sizes: tuple[int, ...], policies: tuple[PolicyName, ...]) -> list[Figure]:
    command = "python -m benchmarks.dispatch_scale"
    found = [
        Figure(
            what=f"dispatch of one request, {policy}, {size:,} hosts",
            measured=f"{1e6 * asyncio.run(dispatch_s(size, policy)):.0f} µs",
            target="≤ 300 µs, flat to within 2 ×",
            command=command,
        )
        for policy in policies
        for size in sizes
    ]
    found += [
        Figure(
            what=f"dispatch of one request by its model, {pools} pools of {hosts:,} hosts",
            measured=f"{1e6 * asyncio.run(pools_s(pools, hosts)):.0f} µs",
            target="≤ 300 µs, flat to within 2 ×",
            command=command,
        )
        for pools, hosts in _POOLS
    ]
    found.append(
        Figure(
            what="judging 1,000 busy hosts once",
            measured=f"{1e3 * asyncio.run(judging_s()):.1f} ms",
            target="≤ 5 ms",
            command=command,
        )
    )
    found.append(
        Figure(
            what="5,000 hosts join",
            measured=f"{asyncio.run(joins_s()):.2f} s",
            target="linear",
            command=command,
        )
    )
    return found


def main() -> None:
    """Prints the figures of all policies named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--policies", nargs="+", default=tuple(POLICIES), choices=tuple(POLICIES))
    options = parser.parse_args()
    rows = [
        (f.what, f.measured, f.target)
        for f in figures(tuple(options.sizes), tuple(options.policies))
    ]
    output.stdout().print(output.table("", ("what", "measured", "target"), rows))


if __name__ == "__main__":
    main()
