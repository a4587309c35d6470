# SPDX-License-Identifier: Apache-2.0
"""Hosts join a router, answer for it, leave, fall silent; strangers are kept out. Over real sockets."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq.asyncio
from linked_hosts import KEYS, Closing, Host, Router, ScriptedHost, until, until_refused
from operations import assert_linear
from scripted_endpoint import LIMITS, ScriptedEndpoint

from pagoda.errors import ConfigError, OverloadedError
from pagoda.ipc.curve import encrypt_client, encrypt_server, keys_of, start_authenticator
from pagoda.messages.frontend import FinishReason
from pagoda.plugins.router.discovery.base import Discovery, HostListener
from pagoda.plugins.router.discovery.joins import JoinDiscovery, Membership
from pagoda.plugins.router.messages import HostRecord, JoinAnswer


async def test_a_request_goes_on_elsewhere_when_its_host_hangs_up() -> None:
    async with Router() as router, ScriptedHost(router, "abcdef") as second:
        first = ScriptedHost(router, "abcdef")
        await router.until_hosts(2)
        for host in (first, second):
            host.endpoint.pause_after = 3
        asking = [asyncio.create_task(router.ask(f"r{index}")) for index in range(2)]
        await first.endpoint.paused.wait()
        await second.endpoint.paused.wait()
        await first.close()
        second.endpoint.go_on.set()
        assert await asyncio.gather(*asking) == [("abcdef", FinishReason.STOP)] * 2
        moved = second.endpoint.requests[-1]
        assert bytes(moved.output_token_ids) == b"abc"
        assert moved.returns
        assert len(router.dispatcher.replicas) == 1


async def test_a_host_that_falls_silent_is_let_go() -> None:
    async with Router() as router, ScriptedHost(router) as host:
        await router.until_hosts(1)
        await host.membership.close()
        await router.until_hosts(0)
        assert not (await router.dispatcher.health()).ready


async def test_a_host_that_leaves_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with Router() as router, ScriptedHost(router, "old") as leaving:
        await router.until_hosts(1)
        leaving.endpoint.pause_after = 1
        asking = asyncio.create_task(router.ask("r1"))
        await leaving.endpoint.paused.wait()
        await leaving.leave()
        async with ScriptedHost(router, "new"):
            await router.until_hosts(2)
            await until(lambda: any(slot.is_leaving for slot in router.dispatcher.slots))
            assert await router.ask("r2") == ("new", FinishReason.STOP)
            leaving.endpoint.go_on.set()
            assert await asking == ("old", FinishReason.STOP)


async def test_a_host_that_was_dismissed_finishes_and_stops_joining(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Router() as router, ScriptedHost(router, "abc") as host:
        await router.until_hosts(1)
        host.endpoint.pause_after = 1
        asking = asyncio.create_task(router.ask("r1"))
        await host.endpoint.paused.wait()
        assert router.registry.dismiss(host.identity.id)
        await until(host.membership.beating.done)
        assert "let this host go: It was let go with DELETE /v1/hosts" in caplog.text
        host.endpoint.go_on.set()
        assert await asking == ("abc", FinishReason.STOP)
        await router.until_hosts(0)
        async with ScriptedHost(router, "new"):
            assert await router.ask("r2") == ("new", FinishReason.STOP)


async def test_another_version_is_refused_with_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.plugins.router.pools.PROTOCOL_VERSION", 1)
    async with Router() as router, ScriptedHost(router):
        await until(lambda: "does not use this host: The router speaks protocol" in caplog.text)
        assert "install the same version of Pagoda on both" in caplog.text
        assert router.dispatcher.replicas == []


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("tcp://127.0.0.1:9", "The host at tcp://127.0.0.1:9 does not answer"),
        ("nonsense", "'nonsense' is not an address like tcp://HOST:PORT"),
    ],
)
async def test_a_host_learns_that_it_cannot_be_reached(
    address: str, problem: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.plugins.router.registry.HELLO_TIMEOUT_S", 0.1)
    async with Router() as router, ScriptedHost(router) as host:
        elsewhere = msgspec.structs.replace(host.record, host_id="elsewhere", address=address)
        membership = Membership(host.context, router.address, KEYS, elsewhere)
        await until(lambda: f"does not use this host: {problem}" in caplog.text)
        await membership.close()
        await router.until_hosts(1)


async def test_a_join_without_the_key_is_not_heard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.plugins.router.discovery.joins.TTL_S", 0.2)
    caplog.set_level(logging.WARNING)
    async with Router() as router, ScriptedHost(router, keys=keys_of(b"some other secret")):
        await until(lambda: "has another --cluster-key-file" in caplog.text)
        assert router.dispatcher.replicas == []


async def test_nonsense_is_ignored() -> None:
    async with Router() as router, ScriptedHost(router, "hello"):
        await router.until_hosts(1)
        for address in (router.address, router.dispatcher.replicas[0].name):
            stranger = router.context.socket(zmq.DEALER)
            encrypt_client(stranger, KEYS)
            stranger.connect(f"tcp://{address}")
            stranger.send_multipart([b"non", b"sense"])
            stranger.close(linger=1000)
        assert await router.ask("r1") == ("hello", FinishReason.STOP)


async def test_when_all_hosts_are_full_a_request_is_refused_with_the_shortest_delay() -> None:
    async with Router() as router, ScriptedHost(router) as first, ScriptedHost(router) as second:
        await router.until_hosts(2)
        first.endpoint.raises = OverloadedError("The waiting queue is full.", retry_after_s=9)
        assert await router.ask("r1") == ("ok", FinishReason.STOP)
        second.endpoint.raises = OverloadedError("The waiting queue is full.", retry_after_s=7)
        with pytest.raises(OverloadedError) as caught:
            await router.ask("r2")
        assert caught.value.retry_after_s == 7


async def test_an_address_that_is_taken_is_refused() -> None:
    async with Router() as router:
        with pytest.raises(ConfigError, match=r"--join-listen .* cannot be listened on"):
            JoinDiscovery(router.context, router.address, KEYS)


class _Told(Discovery):
    """A discovery that names the hosts that a test tells it."""

    def __init__(self) -> None:
        self.listener: HostListener | None = None
        self.followed = asyncio.Event()
        self.failures = 0
        self._named: set[HostRecord] = set()

    async def follow(self, listener: HostListener) -> None:
        self.listener = listener
        if self.failures:
            self.failures -= 1
            raise RuntimeError("nobody has thought of this")
        self.followed.set()
        await asyncio.Event().wait()

    def tell(self, hosts: list[HostRecord]) -> None:
        """These hosts are named now."""
        assert self.listener is not None
        before, self._named = self._named, set(hosts)
        for host in before - self._named:
            self.listener.remove(host)
        for host in self._named - before:
            self.listener.add(host)


@asynccontextmanager
async def telling(failures: int = 0) -> AsyncIterator[tuple[Router, _Told, Host]]:
    """A router that is told of its hosts, and a host of which it was not told yet."""
    host, told = Host(ScriptedEndpoint("ok")), _Told()
    told.failures = failures
    async with Router(lambda _: told) as router:
        await told.followed.wait()
        yield router, told, host
    await host.close()


async def test_a_host_that_is_named_again_while_it_is_connected_to_is_kept() -> None:
    async with telling() as (router, told, host):
        told.tell([host.record])
        assert router.registry.num_named == 1
        told.tell([])
        told.tell([host.record])
        await router.until_hosts(1)


async def test_a_registry_that_was_closed_connects_to_nobody() -> None:
    """The discovery may have a timer that runs out meanwhile."""
    async with telling() as (router, told, host):
        told.tell([host.record])
        await router.until_hosts(1)
        closing = asyncio.create_task(router.registry.close())
        await until(lambda: router.registry.num_named == 0)
        told.tell([host.record])
        assert router.registry.num_named == 0
        await closing


async def test_a_search_that_fails_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.concurrency.async_utils._RESTART_S", 0.01)
    async with telling(failures=2) as (router, told, host):
        assert caplog.text.count("the search for hosts failed") == 2
        told.tell([host.record])
        await router.until_hosts(1)


def _no_socket(*_: object, **__: object) -> None:
    raise zmq.ZMQError(errno.EMFILE)


async def test_a_host_for_which_there_is_no_socket_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagoda.plugins.router.registry._REFUSED_RETRY_S", 0.05)
    async with telling() as (router, told, host):
        monkeypatch.setattr("pagoda.plugins.router.host_client.HostClient.__init__", _no_socket)
        told.tell([host.record])
        [report] = await until_refused(router)
        assert report.reason == (
            "The router has no socket for it (Too many open files); let it open more files."
        )
        monkeypatch.undo()
        await router.until_hosts(1)


class FakeRouter(Closing):
    """Where a host joins, and a test answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ttl_s: float = 0.2) -> None:
        monkeypatch.setattr("pagoda.plugins.router.discovery.joins.TTL_S", ttl_s)
        self.context = zmq.asyncio.Context()
        start_authenticator(self.context, KEYS)
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        encrypt_server(self.socket, KEYS)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"127.0.0.1:{port}"
        record = HostRecord(host_id="h", address="tcp://127.0.0.1:9")
        self.membership = Membership(self.context, self.address, KEYS, record)

    async def answer(self, *answers: JoinAnswer) -> None:
        """Sends all of them, and then that the host is welcome."""
        sender, _ = await self.socket.recv_multipart()
        # The host, which shares this loop, reads nothing before all are sent.
        at_once = zmq.Socket.shadow(self.socket)
        for answer in (*answers, JoinAnswer(ttl_s=0.2)):
            at_once.send_multipart([sender, msgspec.msgpack.encode(answer)])

    async def close(self) -> None:
        await self.membership.close()
        self.socket.close()
        self.context.term()


async def test_an_answer_that_is_no_message_does_not_end_a_membership(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    async with FakeRouter(monkeypatch) as router:
        sender, _ = await router.socket.recv_multipart()
        await router.socket.send_multipart([sender, b"nonsense"])
        await until(lambda: "answers with what is not a message" in caplog.text)
        await router.answer()
        await until(lambda: "joined the router" in caplog.text)


async def test_of_many_answers_that_were_late_the_last_one_counts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    refusals = [JoinAnswer(ttl_s=0.2, refusal=f"It was refused {number}.") for number in range(100)]
    async with FakeRouter(monkeypatch) as router:
        await router.answer(*refusals)
        await until(lambda: "joined the router" in caplog.text)
        assert caplog.text.count("It was refused") < 10


async def test_joins_do_not_heap_up_while_the_router_is_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeRouter(monkeypatch, ttl_s=1.2) as router:
        router.socket.unbind(f"tcp://{router.address}")
        await until(lambda: "does not answer" in caplog.text)
        router.socket.bind(f"tcp://{router.address}")
        await router.socket.recv_multipart()
        num_more = 0
        while await router.socket.poll(100):
            await router.socket.recv_multipart()
            num_more += 1
        assert num_more <= 1


async def test_joins_cost_the_same_however_many_hosts_there_are() -> None:
    """Counts what a join message and the registry cost until connecting begins."""
    routers: list[Router] = []

    def make(num_hosts: int) -> Callable[[], object]:
        router = Router()
        routers.append(router)
        discovery = router.discovery
        assert isinstance(discovery, JoinDiscovery)
        discovery.hosts.listen(router.registry)
        hosts = [HostRecord(host_id=f"{i}", address="tcp://127.0.0.1:1") for i in range(num_hosts)]
        return lambda: [discovery.answer(host) for host in hosts]

    try:
        assert_linear(make, [50, 100, 200])
    finally:
        for router in routers:
            await router.close()


async def test_a_host_with_other_blocks_than_the_others_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = ScriptedEndpoint("ok")
    endpoint.limits = msgspec.structs.replace(endpoint.limits, block_size=32)
    other = Host(endpoint)
    async with telling() as (router, told, host):
        told.tell([host.record])
        await router.until_hosts(1)
        told.tell([host.record, other.record])
        problem = (
            "blocks of 32 tokens, and other hosts of this pool 16; give all the same --block-size"
        )
        await until(lambda: problem in caplog.text)
        assert len(router.dispatcher.replicas) == 1
    await other.close()


class LyingHost(Closing):
    """Joins a router, and answers each of its messages with limits that cannot be."""

    def __init__(self, router: Router, **lies: object) -> None:
        self.context = zmq.Context()
        start_authenticator(self.context, KEYS)
        self.socket = zmq.asyncio.Socket(self.context, zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        encrypt_server(self.socket, KEYS)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        record = HostRecord(host_id="liar", address=f"tcp://127.0.0.1:{port}")
        ready = msgspec.structs.replace(LIMITS, host_id="liar")
        self._lie = msgspec.msgpack.encode(msgspec.to_builtins(ready) | {"type": "ready"} | lies)
        self._membership = Membership(self.context, router.address, KEYS, record)
        self._answering = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        while True:
            peer, *_ = await self.socket.recv_multipart()
            await self.socket.send_multipart([peer, self._lie])

    async def close(self) -> None:
        self._answering.cancel()
        await self._membership.close()
        self.socket.close()
        self.context.term()


@pytest.mark.parametrize(
    ("lies", "field"),
    [({"num_blocks": -1}, "num_blocks"), ({"max_model_len": -5}, "max_model_len")],
)
async def test_limits_that_cannot_be_are_refused_and_never_hold(
    lies: dict[str, object], field: str
) -> None:
    async with Router() as router:
        host = ScriptedHost(router)
        await router.until_hosts(1)
        async with LyingHost(router, **lies):
            reports = await until_refused(router)
            [reason] = [report.reason for report in reports if report.reason]
            assert reason.endswith(
                f"sent what is not a message (Expected `int` >= 1 - at `$.{field}`)."
            )
            assert await router.ask("r1") == ("ok", FinishReason.STOP)
        assert msgspec.structs.replace(router.dispatcher.limits, routers=()) == LIMITS
        await host.close()
        await router.until_hosts(0)
        async with ScriptedHost(router):
            await router.until_hosts(1)
            assert await router.ask("r2") == ("ok", FinishReason.STOP)
