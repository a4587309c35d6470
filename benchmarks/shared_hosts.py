# SPDX-License-Identifier: Apache-2.0
"""Several routers that share hosts against one router, in virtual time: `python -m benchmarks.shared_hosts`.

Routers, hosts and the messages between them are the real ones; the network takes half a millisecond, and steps
take the time of a cost model. Each request comes to a router drawn at random. Hosts tell routers of one another's
work; the last row leaves that out.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.figure import Figure
from benchmarks.routing import LOAD, SEEDS, Outcome, Timed, capacity, heavy_tailed, poisson, replica
from pagoda.cli import output
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.policies import POLICIES, PolicyName
from pagoda.messages.engine_config import EngineConfig
from pagoda.plugins.router.host_client import HostClient, Identity
from pagoda.plugins.router.host_server import HostServer
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.plugins.simulate.event_loop import run
from pagoda.plugins.simulate.sockets import Network, Process, SimSockets

_HOSTS = 8
_POLICY: PolicyName = "least-pending-tokens"
_LATENCY_S = 0.0005
_REQUESTS = 1600


@dataclass(frozen=True)
class Setting:
    """Number of routers, and whether they hear of one another's work."""

    num_routers: int
    are_told: bool = True

    @property
    def name(self) -> str:
        routers = f"{self.num_routers} routers" if self.num_routers > 1 else "1 router"
        return routers if self.are_told else f"{routers} that are told nothing"


SETTINGS = (Setting(1), Setting(2), Setting(4), Setting(2, are_told=False))


def serve(
    traffic: Sequence[Timed], setting: Setting, num_hosts: int, engine: EngineConfig
) -> Outcome:
    """Runs `traffic` through the routers until the last answer is complete."""
    return run(_serve(traffic, setting, num_hosts, engine))


async def _serve(
    traffic: Sequence[Timed], setting: Setting, num_hosts: int, engine: EngineConfig
) -> Outcome:
    network = Network(lambda _: None)

    def sockets(name: str) -> SimSockets:
        return SimSockets(network, Process(name, lambda: _LATENCY_S))

    hosts: list[tuple[Dispatcher, HostServer]] = []
    for number in range(num_hosts):
        dispatcher = Dispatcher([SimEngine(engine).replica], POLICIES[_POLICY])
        await dispatcher.start()
        identity = Identity(f"host{number}", "sim", "digest", is_router=False)
        address = f"tcp://host{number}:1"
        hosts.append((dispatcher, HostServer(dispatcher, sockets(identity.id), address, identity)))
    routers: list[Dispatcher] = []
    clients: list[HostClient] = []
    for number in range(setting.num_routers):
        routers.append(Dispatcher([], POLICIES[_POLICY]))
        identity = Identity(f"router{number}", "sim", "digest", is_router=True)
        for host in range(num_hosts):
            client = HostClient(sockets(identity.id), f"tcp://host{host}:1", identity)
            await client.start()
            if not setting.are_told:
                client.replica.take_work_of_others = lambda _: None  # type: ignore[method-assign,assignment]
            routers[-1].add(client.replica)
            clients.append(client)
    loop, draw = asyncio.get_running_loop(), random.Random(7)
    start = loop.time()

    async def ask(timed: Timed, router: Dispatcher) -> float:
        first = 0.0
        async for chunk in router.generate(timed.request):
            if chunk.token_ids:
                first = first or loop.time()
        return first - start - timed.at

    answers = []
    for timed in traffic:
        await asyncio.sleep(start + timed.at - loop.time())
        answers.append(asyncio.create_task(ask(timed, draw.choice(routers))))
    ttfts = await asyncio.gather(*answers)
    for client in clients:
        await client.close()
    for dispatcher, door in hosts:
        await door.close()
        await dispatcher.close()
    for router in routers:
        await router.close()
    return Outcome(ttfts, 0.0)


def figures(seeds: Sequence[int], num_hosts: int, num_requests: int) -> list[Figure]:
    """Waits for the first token, of all settings over the same traffic."""
    engine = replica()
    rate = num_hosts * LOAD * capacity(heavy_tailed, engine)
    traffic = [poisson(heavy_tailed, seed, num_requests, rate) for seed in seeds]
    found: list[Figure] = []
    alone: list[float] = []
    for setting in SETTINGS:
        outcomes = [serve(one, setting, num_hosts, engine) for one in traffic]
        waits = [fmean(one.ttft(share) for one in outcomes) for share in (0.5, 0.99)]
        alone = alone or waits
        found.append(
            Figure(
                what=f"{setting.name}, {num_hosts} hosts: TTFT p50, p99",
                measured=f"{1e3 * waits[0]:.0f} ms, {1e3 * waits[1]:.0f} ms "
                f"({waits[0] / alone[0]:.2f} ×, {waits[1] / alone[1]:.2f} × one router)",
                target="≤ 1.25 × one router" if setting.are_told else "",
                command="python -m benchmarks.shared_hosts",
            )
        )
    return found


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--hosts", type=int, default=_HOSTS)
    parser.add_argument("--requests", type=int, default=_REQUESTS)
    options = parser.parse_args()
    rows = [
        (f.what, f.measured, f.target)
        for f in figures(options.seeds, options.hosts, options.requests)
    ]
    output.stdout().print(output.table("", ("what", "measured", "target"), rows))


if __name__ == "__main__":
    main()
