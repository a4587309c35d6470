# SPDX-License-Identifier: Apache-2.0
"""A replica over a transport that a test scripts, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import traceback

import msgspec
import pytest
from scripted_endpoint import LIMITS
from virtual_fleet import request, virtual

from pagoda.errors import EngineDeadError, EngineLostError, InvalidRequestError, OverloadedError
from pagoda.fleet.endpoint import Health, ReplicaState
from pagoda.fleet.replica import QUERY_TIMEOUT_S, SILENCE_LIMIT_S, Replica
from pagoda.messages.frontend import (
    AbortRequests,
    FinishReason,
    FrontendMessage,
    GenerateRequest,
    LoadQuery,
    PrefixCacheUpdate,
    RequestRefused,
    SubscribeCache,
    TokenChunk,
    TokenChunks,
    UnsubscribeCache,
)
from pagoda.messages.load import LoadReport, ReplicaLoad
from pagoda.telemetry.tracer import Tracer

TIMEOUT_S = 8.0


class Peer:
    """The transport of a replica, and the peer at its other end, which answers nothing by itself."""

    def __init__(self, hang_timeout_s: float = TIMEOUT_S) -> None:
        self.now_ns = 0
        self.sent: list[FrontendMessage] = []
        self.hung_at: list[float] = []
        self.answers_probes = False
        self.load: dict[str, object] = {}
        self.raises: Exception | None = None
        self.replica = Replica(
            self,
            "the engine",
            Tracer("frontend", clock_ns=lambda: self.now_ns),
            hang_timeout_s=hang_timeout_s,
            on_hang=lambda: self.hung_at.append(now()),
        )
        self.replica.receive(LIMITS)

    def send(self, message: FrontendMessage) -> None:
        if self.raises is not None:
            raise self.raises
        self.sent.append(message)
        if self.answers_probes and isinstance(message, LoadQuery):
            self.replica.receive(report(message.query_id, **self.load))

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def push(self, wire_id: str, *token_ids: int, reason: FinishReason | None = None) -> None:
        """Sends tokens of a request. Wire ids count from 1."""
        chunk = TokenChunk(wire_id, list(token_ids), reason, received_ns=1)
        self.replica.receive(TokenChunks([chunk]))


def now() -> float:
    return asyncio.get_running_loop().time()


def report(query_id: int | None, **fields: object) -> LoadReport:
    return LoadReport(**fields, query_id=query_id)  # type: ignore[arg-type]


@virtual
async def test_chunks_are_stamped_on_arrival_not_when_they_are_read() -> None:
    peer = Peer()
    stream = peer.replica.generate(request("r"))
    assert peer.sent == [request("r", wire_id="1")]
    peer.now_ns = 5
    peer.push("1", 7)
    peer.now_ns = 8
    peer.push("1", 7, reason=FinishReason.LENGTH)
    peer.now_ns = 100
    assert [chunk.received_ns async for chunk in stream] == [5, 8]


@virtual
async def test_a_second_request_of_an_id_is_refused_and_the_first_one_goes_on() -> None:
    peer = Peer()
    first = peer.replica.generate(request("r"))
    with pytest.raises(InvalidRequestError, match="id r is already running"):
        peer.replica.generate(request("r"))
    peer.push("1", 1, 2, reason=FinishReason.LENGTH)
    assert [chunk.token_ids async for chunk in first] == [[1, 2]]
    assert peer.sent == [request("r", wire_id="1")]
    peer.replica.generate(request("r"))


@virtual
async def test_a_request_that_can_never_run_is_the_clients_error() -> None:
    peer = Peer()
    stream = peer.replica.generate(request("r"))
    peer.replica.receive(RequestRefused("1", error="the grammar is wrong."))
    with pytest.raises(InvalidRequestError, match="the grammar is wrong"):
        await anext(stream)


@virtual
async def test_chunks_of_an_earlier_request_are_not_mistaken_for_those_of_one_with_its_id() -> None:
    peer = Peer()
    first = peer.replica.generate(request("r"))
    await first.aclose()
    second = peer.replica.generate(request("r"))
    peer.push("1", 7, reason=FinishReason.LENGTH)  # was on its way when the first one was aborted
    peer.replica.receive(RequestRefused("1", 7))
    peer.push("2", 8, reason=FinishReason.LENGTH)
    assert [(chunk.request_id, chunk.token_ids) async for chunk in second] == [("r", [8])]
    assert [m for m in peer.sent if isinstance(m, GenerateRequest)] == [
        request("r", wire_id="1"),
        request("r", wire_id="2"),
    ]


@virtual
async def test_what_cannot_be_sent_leaves_nothing_behind() -> None:
    peer = Peer()
    replica = peer.replica
    peer.raises = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
    for ask in (
        lambda: replica.generate(request("r")),
        lambda: replica.subscribe_cache(print),
        lambda: replica.subscribe_steps(print),
    ):
        with pytest.raises(UnicodeEncodeError):
            ask()
    with pytest.raises(UnicodeEncodeError):
        await replica.load()
    assert (replica.num_streams, replica.num_subscribers) == (0, 0)
    await asyncio.sleep(3 * TIMEOUT_S)
    assert not peer.hung_at, "no answer is owed"
    peer.raises = None
    stream = replica.generate(request("r"))
    peer.push("2", 1, reason=FinishReason.LENGTH)
    assert [chunk.token_ids async for chunk in stream] == [[1]]


@virtual
async def test_a_stream_that_is_closed_early_is_aborted_once() -> None:
    peer = Peer()
    stream = peer.replica.generate(request("r"))
    peer.push("1", 1)
    async with contextlib.aclosing(stream):
        assert (await anext(stream)).token_ids == [1]
    await stream.aclose()
    assert peer.sent == [request("r", wire_id="1"), AbortRequests(["1"])]
    assert peer.replica.num_streams == 0
    assert [chunk async for chunk in stream] == []


@virtual
async def test_aborting_ends_the_stream_and_unknown_ids_are_ignored() -> None:
    peer = Peer()
    stream = peer.replica.generate(request("r"))
    await peer.replica.abort("unknown")
    await peer.replica.abort("r")
    assert [chunk.finish_reason async for chunk in stream] == [FinishReason.ABORT]
    assert peer.sent == [request("r", wire_id="1"), AbortRequests(["1"])]


@virtual
async def test_a_refusal_ends_its_stream_alone() -> None:
    peer = Peer()
    refused, other = (peer.replica.generate(request(name)) for name in "ab")
    peer.replica.receive(RequestRefused("1", 7))
    with pytest.raises(OverloadedError) as caught:
        await anext(refused)
    assert caught.value.retry_after_s == 7
    peer.push("2", 1)
    assert (await anext(other)).token_ids == [1]


@virtual
async def test_a_lost_peer_fails_every_stream_and_query_with_an_error_of_its_own() -> None:
    """One exception that several tasks raise collects the frames of all of them."""
    peer = Peer()
    streams = [peer.replica.generate(request(name)) for name in "ab"]
    query = asyncio.create_task(peer.replica.load())
    await asyncio.sleep(0)
    peer.push("1", 1)
    peer.replica.lose("The engine ended.")
    assert (await anext(streams[0])).token_ids == [1], "what came before the error is delivered"
    errors = await asyncio.gather(*map(anext, streams), query, return_exceptions=True)
    assert [str(error) for error in errors] == ["The engine ended."] * 3
    assert len({id(error) for error in errors}) == 3
    assert peer.replica.state is ReplicaState.STARTING
    with pytest.raises(EngineLostError, match="The engine is not running"):
        peer.replica.generate(request("r"))


@virtual
async def test_a_failure_that_is_raised_again_and_again_keeps_no_frames() -> None:
    peer = Peer()
    peer.replica.fail(EngineDeadError("It was given up."))
    depths = []
    for _ in range(3):
        with pytest.raises(EngineDeadError, match="given up") as caught:
            peer.replica.generate(request("r"))
        depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert depths == depths[:1] * 3
    assert str(await peer.replica.wait_failed()) == "It was given up."


@virtual
async def test_the_next_peer_is_asked_for_what_the_last_one_was_asked_for() -> None:
    peer = Peer()
    heard: list[PrefixCacheUpdate] = []
    end = peer.replica.subscribe_cache(heard.append)
    peer.replica.lose("The engine ended.")
    peer.sent.clear()
    peer.replica.receive(LIMITS)
    assert peer.sent == [SubscribeCache()]
    update = PrefixCacheUpdate(b"", b"")
    peer.replica.receive(update)
    peer.sent.clear()
    end()
    peer.replica.receive(update)
    assert heard == [update]
    assert peer.sent == [UnsubscribeCache()]


@virtual
async def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    peer = Peer()
    peer.answers_probes = True
    stream = peer.replica.generate(request("r"))
    draining = asyncio.create_task(peer.replica.drain(30))
    await asyncio.sleep(1)
    with pytest.raises(OverloadedError, match="shutting down"):
        peer.replica.generate(request("late"))
    assert (await peer.replica.health()).reason == "the server is shutting down"
    peer.push("1", 7, reason=FinishReason.LENGTH)
    await draining
    assert [chunk.finish_reason async for chunk in stream] == [FinishReason.LENGTH]
    assert now() < 2


@virtual
async def test_draining_ends_stragglers() -> None:
    peer = Peer()
    stream = peer.replica.generate(request("r"))
    await peer.replica.drain(3)
    assert [chunk.finish_reason async for chunk in stream] == [FinishReason.ABORT]
    assert peer.sent[-1] == AbortRequests(["1"])


@pytest.mark.parametrize(("host_id", "waits_s"), [("", 7), ("a host, which has drained itself", 0)])
@virtual
async def test_draining_waits_until_others_have_read_the_kv_of_an_engine(
    host_id: str, waits_s: float
) -> None:
    peer = Peer()
    peer.replica.receive(msgspec.structs.replace(LIMITS, host_id=host_id))
    peer.answers_probes = True
    peer.load = {"num_wanted_leases": 1}
    asyncio.get_running_loop().call_later(7, peer.load.clear)
    await peer.replica.drain(30)
    assert now() == pytest.approx(waits_s, abs=0.2)


@virtual
async def test_reports_say_if_the_worker_computes() -> None:
    peer = Peer()
    states = [peer.replica.state]
    peer.replica.watch(lambda: states.append(peer.replica.state))
    for is_ready in (True, False, True):
        peer.replica.receive(report(None, is_worker_ready=is_ready))
    assert states == [ReplicaState.READY, ReplicaState.DEGRADED, ReplicaState.READY]


# ---- watchdog


@virtual
async def test_a_silent_peer_with_a_request_hangs_within_the_time_out() -> None:
    peer = Peer()
    peer.replica.generate(request("r"))
    await asyncio.sleep(3 * TIMEOUT_S)
    assert len(peer.hung_at) == 1
    assert TIMEOUT_S * 7 / 8 <= peer.hung_at[0] <= TIMEOUT_S


@virtual
async def test_a_silent_peer_hangs_though_who_asked_has_given_up() -> None:
    peer = Peer(hang_timeout_s=10 * QUERY_TIMEOUT_S)  # a tick is longer than a query
    with pytest.raises(TimeoutError):
        await peer.replica.load()
    await asyncio.sleep(10 * QUERY_TIMEOUT_S)
    assert peer.hung_at == [10 * QUERY_TIMEOUT_S]
    assert (await peer.replica.health()).reason == "the engine does not answer"


@virtual
async def test_a_peer_is_ready_while_it_says_something_whatever_becomes_of_a_query() -> None:
    """On a busy machine an answer may take longer than a query waits."""
    peer = Peer(hang_timeout_s=1000.0)
    peer.replica.generate(request("r"))
    for _ in range(10):
        asking = asyncio.create_task(peer.replica.health())
        await asyncio.sleep(QUERY_TIMEOUT_S / 2)
        peer.push("1", 7)
        assert (await asking).ready
        await asyncio.sleep(QUERY_TIMEOUT_S)
    assert [(await peer.replica.health()).ready for _ in range(6)] == [True] * 4 + [False] * 2
    peer.push("1", 7)
    assert (await peer.replica.health()).ready
    peer.replica.receive(report(None, stalled_for_s=100.0))
    assert (await peer.replica.health()).reason == "no step has finished for 100 s"


@virtual
async def test_a_peer_that_owed_nothing_for_long_is_ready_until_it_does() -> None:
    peer = Peer(hang_timeout_s=1000.0)
    await asyncio.sleep(10 * SILENCE_LIMIT_S)
    assert (await peer.replica.health()).ready
    await asyncio.sleep(SILENCE_LIMIT_S - QUERY_TIMEOUT_S)
    assert (await peer.replica.health()).reason == "the engine does not answer"
    peer.replica.lose("gone")
    peer.replica.receive(LIMITS)
    assert (await peer.replica.health()).ready


@virtual
async def test_a_peer_that_answers_probes_may_compute_for_as_long_as_it_takes() -> None:
    peer = Peer()
    peer.answers_probes = True
    stream = peer.replica.generate(request("r"))
    await asyncio.sleep(10 * TIMEOUT_S)
    assert not peer.hung_at
    peer.push("1", 1, reason=FinishReason.LENGTH)
    assert [chunk.token_ids async for chunk in stream] == [[1]]
    num_sent = len(peer.sent)
    await asyncio.sleep(10 * TIMEOUT_S)
    assert len(peer.sent) <= num_sent + 1, "an idle peer is left alone"


@virtual
async def test_a_frontend_that_was_stopped_itself_does_not_blame_its_peer() -> None:
    peer = Peer()
    peer.replica.generate(request("r"))
    loop = asyncio.get_running_loop()
    loop.clock.advance_to(now() + 100 * TIMEOUT_S)  # type: ignore[attr-defined]
    await asyncio.sleep(0.01)
    assert not peer.hung_at, "what the peer has sent meanwhile is not read yet"
    peer.answers_probes = True
    await asyncio.sleep(3 * TIMEOUT_S)
    assert not peer.hung_at


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ((LoadReport(), None), ""),
        ((None, None), "the engine does not answer"),
        ((LoadReport(stalled_for_s=100.0), None), "no step has finished for 100 s"),
        ((LoadReport(is_worker_ready=False),), "the worker is restarting"),
    ],
)
async def test_a_router_calls_a_host_ready_if_any_of_its_engines_makes_progress(
    reports: tuple[LoadReport | None, ...], reason: str
) -> None:
    peer = Peer()
    peer.answers_probes = True
    peer.load["replicas"] = tuple(
        ReplicaLoad(name="", state="ready", num_requests=0, weighed_tokens=0, report=report)
        for report in reports
    )
    assert await peer.replica.health() == Health(not reason, reason)
