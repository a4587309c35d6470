# SPDX-License-Identifier: Apache-2.0
"""A prefill engine and a decode engine in virtual time, and whoever gives requests to both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import kv_tiers
import msgspec
from harness import Harness, assert_complete, make_request, reworked

from benchmarks.simulation.books import check_books, in_state
from pagoda.engine.request import RequestState
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.layout import KVLayout
from pagoda.messages.engine_config import HandoffConfig
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk
from pagoda.messages.worker_config import CurveKeys, Role
from pagoda.plugins.disaggregation.connector import RemoteKV
from pagoda.plugins.disaggregation.exporter import KVExporter
from pagoda.plugins.disaggregation.hooks import HandoffHooks
from pagoda.plugins.disaggregation.messages import DecodeMessage, PrefillMessage
from pagoda.plugins.disaggregation.transfer_tokens import TransferTokens
from pagoda.plugins.simulate.network import SimListener, SimNetwork, SimPeers

LEASE_S = 30.0
NO_KEYS = CurveKeys("", "", "", "")
READY = msgspec.structs.replace(kv_tiers.READY, kv_digest="digest", arithmetic="arithmetic")

Message = DecodeMessage | PrefillMessage


def handoff(role: Role, *, lease_s: float = LEASE_S) -> HandoffConfig:
    return HandoffConfig(role=role, host="p", keys=NO_KEYS, lease_s=lease_s)


def make_exporter(num_blocks: int) -> tuple[KVExporter, SimListener, BlockPool, VirtualClock]:
    """An exporter without an engine, and what it works with."""
    clock, pool = VirtualClock(), BlockPool(num_blocks)
    listener = SimNetwork(clock).listener("tcp://p:1")
    tokens = TransferTokens(NO_KEYS)
    exporter = KVExporter(listener, pool, KVLayout(4), clock, tokens, "e", LEASE_S)
    return exporter, listener, pool, clock


class Engine(Harness):
    """One engine with a role, from one of its starts to the next."""

    _starts = count()

    def __init__(
        self, pair: Pair, role: Role, address: str, *, fails: bool = False, **options: Any
    ) -> None:
        self.address = address
        self._network = pair.network
        self.links = pair.network.links(f"engine{next(self._starts)}", role, address)
        super().__init__(
            clock=pair.clock,
            handoff=handoff(role),
            fails=fails,
            links=self.links,
            neighbours=pair.network.neighbours,
            **options,
        )

    @property
    def peers(self) -> HandoffHooks:
        assert isinstance(self.hooks.peers, HandoffHooks)
        return self.hooks.peers

    @property
    def exporter(self) -> KVExporter:
        exporter = self.peers.exporter
        assert exporter is not None
        return exporter

    @property
    def remote(self) -> RemoteKV:
        remote = self.peers.remote
        assert remote is not None
        return remote

    def add(self, request: GenerateRequest, *, steps: bool = False) -> list[TokenChunk]:
        return super().add(request, steps=steps)

    def next_event_at(self) -> float | None:
        places: Sequence[SimListener | SimPeers | None] = (self.links.listener, self.links.peers)  # type: ignore[assignment]
        instants = [place.next_event_at() for place in places if place is not None]
        return earliest([*instants, self.core.next_wakeup()])

    def kill(self) -> None:
        """Ends the engine without a last message; others see that it hung up."""
        self.links.close()
        self.core.executor.close()

    def check_books(self) -> None:
        check_books(self.scheduler)
        if self.peers.remote is not None:
            assert_consistent(self.remote)

    def check_nothing_left(self) -> None:
        self.check_books()
        super().check_nothing_left()
        if self.peers.remote is not None:
            assert not self.remote.fetches
            assert not any(peer.fetches for peer in self.remote.peers.values())


class Pair:
    """One engine that prefills and one that decodes."""

    def __init__(
        self,
        *,
        fate: Callable[[Message], Sequence[float]] = lambda _: (0.001,),
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        fails: bool = False,
        roles: tuple[Role, Role] = (Role.PREFILL, Role.DECODE),
        lateness: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`lateness` returns the seconds by which both engines' loops turn after the next event: events meet."""
        self.clock = VirtualClock()
        self._roles = roles
        self._options = prefill or {}, {"fails": fails, **(decode or {})}
        self.sent: list[Message] = []
        self.chunks: list[TokenChunk] = []
        """Chunks of the last step of each engine."""
        self._fate = fate
        self._lateness = lateness
        self.network = SimNetwork(self.clock, self._remember)
        self.prefill = Engine(self, roles[0], "tcp://p:1", **self._options[0])
        self.decode = Engine(self, roles[1], "tcp://d:1", **self._options[1])
        self.requests: dict[str, GenerateRequest] = {}
        self.sources: dict[str, KVSource] = {}
        """Sources of requests that the prefill engine computes or has computed."""

    def _remember(self, message: Message) -> Sequence[float]:
        self.sent.append(message)
        return self._fate(message)

    def told(self, kind: type[Message]) -> list[Any]:
        """Messages of this kind that were sent."""
        return [message for message in self.sent if isinstance(message, kind)]

    @property
    def num_loaded(self) -> int:
        """Blocks that the decode engine has loaded into its nearest tier."""
        return self.decode.core.load().tiers[0].num_loaded

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def hold(self, request: GenerateRequest) -> KVSource:
        """The prefill engine computes the prompt of the request, and holds its KV."""
        held = msgspec.structs.replace(request, holds_kv=True)
        (news,) = self.prefill.add(held)
        assert news.kv_source is not None
        self.sources[request.request_id] = news.kv_source
        return news.kv_source

    def submit(self, *requests: GenerateRequest) -> KVSource:
        """Sends requests to both engines, as a router does; returns the last source."""
        for request in requests:
            source = self.hold(request)
            self.fetch(request, source)
        return source

    def fetch(self, request: GenerateRequest, source: KVSource) -> None:
        """The decode engine answers the request."""
        self.requests[request.request_id] = request
        self.decode.add(msgspec.structs.replace(request, kv_source=source))

    def replace_prefill(self) -> None:
        """The prefill engine dies, and another one starts at its address."""
        self.prefill.kill()
        self.prefill = Engine(self, self._roles[0], self.prefill.address, **self._options[0])

    def replace_decode(
        self, choose: Callable[[GenerateRequest], KVSource | None] | None = None
    ) -> None:
        """The decode engine dies; requests go on at another one with their tokens so far, as pods let them.

        `choose` returns the source of a request's KV; by default it is the one that it had.
        """
        old = self.decode
        old.kill()
        self.decode = Engine(self, self._roles[1], old.address, **self._options[1])
        for request_id in old.scheduler.requests:
            request = self.requests[request_id]
            source = choose(request) if choose else self.sources.get(request_id)
            so_far = old.tokens[request_id]
            again = msgspec.structs.replace(
                request, output_token_ids=so_far, returns=True, kv_source=source
            )
            self.decode.add(again)
        self.decode.tokens = old.tokens | self.decode.tokens
        self.decode.finished = old.finished | self.decode.finished

    def next_event_at(self) -> float | None:
        return earliest([engine.next_event_at() for engine in self.engines])

    def tick(self) -> bool:
        """Moves time to the next event; False when nothing will happen any more."""
        instant = self.next_event_at()
        if instant is None:
            return False
        self.clock.advance_to(instant)
        self.be_late()
        self.step()
        return True

    def be_late(self) -> None:
        """Lets time pass in which no loop turns."""
        self.clock.advance_to(self.clock.now() + self._lateness())

    def step(self) -> None:
        self.chunks = [chunk for engine in self.engines for chunk in engine.step()]

    def run(self, max_ticks: int = 20_000) -> None:
        """Runs until nothing happens any more."""
        self.run_until(lambda: self.next_event_at() is None, max_ticks)

    def finish(self, *requests: GenerateRequest) -> None:
        """Runs until nothing happens any more: the decode engine has answered `requests`, and nothing is left."""
        self.run()
        assert_complete(self.decode, list(requests))
        self.check_nothing_left()

    def run_until(self, condition: Callable[[], bool], max_ticks: int = 20_000) -> None:
        self.step()
        for _ in range(max_ticks):
            if condition():
                return
            assert self.tick(), "it will never be so"
        raise AssertionError("the engines go on for ever")

    def check_nothing_left(self) -> None:
        for engine in self.engines:
            engine.check_nothing_left()


def earliest(instants: Sequence[float | None]) -> float | None:
    return min((instant for instant in instants if instant is not None), default=None)


def assert_consistent(remote: RemoteKV) -> None:
    """Every fetch is in both lists, once."""
    of_peers = [fetch for peer in remote.peers.values() for fetch in peer.fetches.values()]
    assert len(of_peers) == len(remote.fetches)
    for fetch in of_peers:
        assert remote.fetches[fetch.prefix.request_id] is fetch
        assert fetch.end <= len(fetch.prefix.keys)


# ---- a prompt, and where requests stand

PROMPT = [token % 50 for token in range(3, 45)]
CHUNKS = {"max_num_batched_tokens": 12}
"""The prompt is computed in four steps."""


def documents(count: int) -> list[list[int]]:
    return [[(token * (n + 2) + n) % 50 for token in range(40)] for n in range(count)]


def requests_of(count: int, **options: Any) -> list[GenerateRequest]:
    """Requests for different documents."""
    return [make_request(f"r{n}", it, **options) for n, it in enumerate(documents(count))]


def resampled(request: GenerateRequest, **fields: Any) -> GenerateRequest:
    """Returns the request with other fields of its sampling parameters."""
    sampling = msgspec.structs.replace(request.work.sampling, **fields)
    return reworked(request, sampling=sampling)


def is_loading(pair: Pair) -> bool:
    return bool(in_state(pair.decode.scheduler, RequestState.LOADING))


def is_awaiting(pair: Pair) -> bool:
    return bool(in_state(pair.decode.scheduler, RequestState.AWAITING_KV))


def has_leases(pair: Pair) -> bool:
    return bool(pair.prefill.exporter.leases)
