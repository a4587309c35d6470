# SPDX-License-Identifier: Apache-2.0
"""A replica hangs, is slow or flaps: its requests go on elsewhere, new ones avoid it, and it returns slowly."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from virtual_fleet import ask, engine_config, request, start, start_fleet, virtual

from pagoda.fleet import outliers
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.policies import PolicyName
from pagoda.fleet.token_stream import TokenStream
from pagoda.messages.frontend import GenerateRequest
from pagoda.plugins.simulate.engine import SimEngine

Generate = Callable[[GenerateRequest], TokenStream]


class Traffic:
    """Requests that come at a constant rate, and to which replica each was given."""

    def __init__(self, dispatcher: Dispatcher, *, per_s: float = 10, max_tokens: int = 20) -> None:
        self.dispatcher = dispatcher
        self.per_s = per_s
        self.max_tokens = max_tokens
        self.asking: list[asyncio.Task[float]] = []
        self.placed: Counter[int] = Counter()
        """Requests that each replica was given so far, by its number."""
        for slot in dispatcher.slots:
            take = partial(self._take, slot.number, slot.replica.generate)
            slot.replica.generate = take  # type: ignore[assignment, method-assign]

    def _take(self, number: int, generate: Generate, asked: GenerateRequest) -> TokenStream:
        self.placed[number] += 1
        return generate(asked)

    async def come(self, for_s: float) -> Counter[int]:
        """Returns the number of requests that each replica was given meanwhile."""
        before = self.placed.copy()
        for _ in range(int(for_s * self.per_s)):
            self.asking.append(asyncio.create_task(self._ask(len(self.asking))))
            await asyncio.sleep(1 / self.per_s)
        return self.placed - before

    async def _ask(self, number: int) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        prompt = [number % 90, number // 90 + 1]
        asked = request(f"r{number}", prompt, max_tokens=self.max_tokens)
        assert (await ask(self.dispatcher, asked)).complete
        return loop.time() - began

    async def end(self) -> list[float]:
        """How long each took."""
        return await asyncio.gather(*self.asking)


@pytest.mark.parametrize("policy", ["round-robin", "least-pending-tokens", "prefix-affinity"])
@virtual
async def test_a_replica_that_hangs(policy: PolicyName) -> None:
    dispatcher, engines = await start(4, policy)
    traffic = Traffic(dispatcher)
    await traffic.come(2)
    engines[2].hang(25)
    await traffic.come(outliers.SILENCE_S + 2)
    assert [r.state for r in (await dispatcher.load()).replicas][2] == "ejected"
    assert (await traffic.come(2))[2] == 0
    await traffic.come(38)
    assert (await traffic.come(20))[2] > 0.15 * 20 * traffic.per_s
    durations = await traffic.end()
    longest = outliers.STUCK_S + 2
    assert max(durations) < longest
    assert sum(duration > 1 for duration in durations) < 0.1 * len(durations)


@virtual
async def test_a_replica_that_is_slow() -> None:
    engines = [SimEngine(engine_config(base_s=base_s)) for base_s in (0.02, 0.02, 0.02, 0.2)]
    dispatcher = await start_fleet(engines, "round-robin")
    traffic = Traffic(dispatcher)
    placed = await traffic.come(30)
    share = placed[3] / sum(placed.values())
    assert 0 < share < 0.1
    await traffic.end()


@virtual
async def test_a_replica_that_flaps() -> None:
    dispatcher, engines = await start(3, "round-robin")
    traffic = Traffic(dispatcher, per_s=10)
    shares = []
    for _ in range(8):
        placed = await traffic.come(8)
        shares.append(placed[1] / sum(placed.values()))
        engines[1].kill(restart_s=0.1)
    assert shares[0] == pytest.approx(1 / 3, abs=0.02)
    assert max(shares[3:]) < 0.1
    await traffic.come(50)
    placed = await traffic.come(20)
    assert placed[1] / sum(placed.values()) == pytest.approx(1 / 3, abs=0.02)
    await traffic.end()


@virtual
async def test_the_last_one_is_never_ejected() -> None:
    dispatcher, engines = await start(2, "round-robin")
    traffic = Traffic(dispatcher)
    for _ in range(3):
        await traffic.come(4)
        for engine in engines:
            engine.kill(restart_s=0.1)
    placed = await traffic.come(2)
    assert sum(placed.values()) >= 2 * traffic.per_s
    durations = await traffic.end()
    assert max(durations) < 3


@virtual
async def test_a_client_that_does_not_read_makes_no_replica_silent() -> None:
    dispatcher, _ = await start(2, "round-robin")
    chunks = dispatcher.generate(request("idle", max_tokens=60))
    await anext(chunks)
    traffic = Traffic(dispatcher)
    await traffic.come(3 * outliers.STUCK_S)
    assert {r.state for r in (await dispatcher.load()).replicas} == {"ready"}
    tokens = [token async for chunk in chunks for token in chunk.token_ids]
    assert len(tokens) == 59
    await traffic.end()


@virtual
async def test_an_idle_fleet_is_not_watched() -> None:
    dispatcher, _ = await start(2)
    await ask(dispatcher, request("one"))
    await asyncio.sleep(2)
    assert not dispatcher.is_judging


@virtual
async def test_the_time_is_taken_of_requests_that_come_one_by_one() -> None:
    """Of two requests at a time it is taken of the first, and of the other once that has left."""
    dispatcher, _ = await start(2, "round-robin")

    def num_samples() -> list[int]:
        return [slot.health.pace.num_samples for slot in dispatcher.slots]

    before = num_samples()
    for number in range(3):
        for name in ("even", "odd"):
            assert (await ask(dispatcher, request(f"{name}{number}", max_tokens=10))).complete
        assert all(now - then >= 9 for now, then in zip(num_samples(), before, strict=True))
        before = num_samples()
    first = asyncio.create_task(ask(dispatcher, request("first", max_tokens=60)))
    while "first" not in (probes := [slot.health.probe for slot in dispatcher.slots]):
        await asyncio.sleep(0.01)
    place = probes.index("first")
    for number in range(4):
        assert (await ask(dispatcher, request(f"short{number}", max_tokens=2))).complete
    assert [*dispatcher.slots][place].health.probe == "first"
    assert (await first).complete
    assert [slot.health.probe for slot in dispatcher.slots] == [None, None]
