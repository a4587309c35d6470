# SPDX-License-Identifier: Apache-2.0
"""Hosts stand in a real etcd, which is killed, loses everything, compacts its history; routers follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from certificates import Certificates
from etcd_server import EtcdServer
from linked_hosts import Host, Router, until
from scripted_endpoint import ScriptedEndpoint

from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import ConfigError
from pagoda.plugins.router.discovery.etcd import EtcdDiscovery, EtcdRegistration
from pagoda.plugins.router.discovery.etcd_client import EtcdClient, EtcdError
from pagoda.plugins.router.discovery.etcd_place import EtcdPlace, etcd_files
from pagoda.plugins.router.messages import HostRecord


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """For tests that leave it as it is."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_RETRY_S": 0.05, "_LOOK_S": 0.2, "TTL_S": 1.0}.items():
        monkeypatch.setattr(f"pagoda.plugins.router.discovery.etcd.{name}", value)


class View:
    """The hosts that a discovery names, and how often it withdrew one."""

    def __init__(self, at: EtcdPlace) -> None:
        self.discovery = EtcdDiscovery(at)
        self.ids: set[str] = set()
        self.num_removed = 0
        self._following = asyncio.create_task(self.discovery.follow(self))

    def add(self, host: HostRecord) -> None:
        self.ids.add(host.host_id)

    def remove(self, host: HostRecord) -> None:
        self.ids.remove(host.host_id)
        self.num_removed += 1

    async def until(self, *ids: str) -> None:
        await until(lambda: self.ids == set(ids))

    async def close(self) -> None:
        await cancel_all([self._following])
        await self.discovery.close()


def record(name: str) -> HostRecord:
    return HostRecord(host_id=name, address="tcp://127.0.0.1:1")


class Place:
    """A prefix in an etcd, and who reads and writes there until the test ends."""

    def __init__(self, server: EtcdServer, prefix: str, stack: AsyncExitStack) -> None:
        self.server = server
        self.prefix = prefix
        self._stack = stack
        self.client = EtcdClient([server.address])
        stack.push_async_callback(self.client.close)

    def below(self, path: str) -> Place:
        return Place(self.server, self.prefix + path, self._stack)

    def named(self) -> EtcdPlace:
        return EtcdPlace((self.server.address,), self.prefix)

    def register(self, host: str | HostRecord) -> EtcdRegistration:
        host = record(host) if isinstance(host, str) else host
        registration = EtcdRegistration(self.named(), host)
        self._stack.push_async_callback(registration.close)
        return registration

    def view(self) -> View:
        view = View(self.named())
        self._stack.push_async_callback(view.close)
        return view

    async def overwrite(self, name: str, value: bytes) -> None:
        """Another value for a key that there is; its lease stays."""
        key = f"{self.prefix}/{name}".encode()
        await self.client.call("kv/put", {"key": key, "value": value, "ignore_lease": True}, dict)


@pytest.fixture
async def place(shared: EtcdServer, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(shared, request.node.name, stack)


@pytest.fixture
async def own_place(own: EtcdServer) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(own, "pagoda/tests", stack)


async def test_hosts_come_and_go(place: Place) -> None:
    first, view = place.register("a"), place.view()
    await view.until("a")
    second = place.register("b")
    await view.until("a", "b")
    await first.close()
    await view.until("b")
    await second.close()
    await view.until()


async def test_a_host_that_does_not_renew_its_lease_is_gone(place: Place) -> None:
    host, view = place.register("a"), place.view()
    await view.until("a")
    host.beating.cancel()
    await view.until()


async def test_prefixes_do_not_mix(place: Place) -> None:
    place.register("a")
    for path in ("two", "/two"):
        place.below(path).register("b")
    await place.below("/two").view().until("b")
    view = place.view()
    await view.until("a")
    place.below("/two").register("c")
    place.register("d")
    await until(lambda: len(view.ids) == 2)
    assert view.ids == {"a", "d"}


async def test_what_is_no_host_is_told_of_and_left_out(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"{place.prefix}/x"
    await place.client.put(key, b"{}", await place.client.grant(60))
    place.register("a")
    await place.view().until("a")
    assert f"has no host at {key}: Object missing required field" in caplog.text


async def test_hosts_stay_while_etcd_is_away_and_others_come_when_it_is_back(
    own_place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    own_place.register("a")
    gone, view = own_place.register("b"), own_place.view()
    await view.until("a", "b")
    await asyncio.to_thread(own_place.server.kill)
    await gone.close()
    own_place.register("c")
    await until(lambda: "cannot be used" in caplog.text)
    assert view.ids == {"a", "b"}
    await asyncio.to_thread(own_place.server.start)
    await view.until("a", "c")


async def test_hosts_are_not_gone_when_etcd_has_lost_everything(own_place: Place) -> None:
    host, view = own_place.register("a"), own_place.view()
    await view.until("a")
    await asyncio.to_thread(own_place.server.forget)
    await asyncio.to_thread(own_place.server.start)
    async with asyncio.timeout(20):
        while await own_place.client.get(f"{own_place.prefix}/a") is None:
            await asyncio.sleep(0.02)
    await host.close()
    await view.until()
    assert view.num_removed == 1, "a host that was there all the time was withdrawn"


async def test_a_router_goes_on_after_a_compaction(own_place: Place) -> None:
    """The events that it missed are not kept any more."""
    host, view, client = own_place.register("a"), own_place.view(), own_place.client
    prefix = f"{own_place.prefix}/"
    await view.until("a")
    revision = (await client.read(prefix)).header.revision
    for _ in range(3):
        await own_place.overwrite("a", msgspec.json.encode({"host": record("a")}))
    await client.call("kv/compaction", {"revision": revision + 2, "physical": True}, dict)
    watched = [events async for events in client.watch(prefix, revision)]
    assert not any(watched)
    await host.close()
    await view.until()


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_host_that_was_dismissed_stays_away_from_all(
    place: Place, is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A late host reads its dismissal all the same."""
    host, view, other = place.register("a"), place.view(), place.view()
    for each in (view, other):
        await each.until("a")
    if is_late:
        host.beating.cancel()
        await view.until()  # its lease has run out
    view.discovery.dismiss(record("a"), "Go.")
    if is_late:
        await until(lambda: not view.discovery.dismissals)
        await host.beat()
    else:
        await until(host.beating.done)
    assert "let go by a router" in caplog.text
    for each in (view, other):
        await each.until()


async def test_a_host_writes_itself_anew_where_something_else_stands(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    host = place.register("a")
    await place.view().until("a")
    key = f"{place.prefix}/a"
    for garbage in (b"nonsense", b'{"host": "\xff"}', b"[" * 9999):
        await place.overwrite("a", garbage)
        async with asyncio.timeout(20):
            while await place.client.get(key) == garbage:
                await asyncio.sleep(0.02)
    assert not host.beating.done()
    assert f"{key} in etcd at" in caplog.text


@asynccontextmanager
async def client_of(*servers: str) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(servers)
    try:
        yield client
    finally:
        await client.close()


async def test_a_server_that_does_not_answer_is_passed_over(shared: EtcdServer) -> None:
    async with client_of("127.0.0.1:9", shared.address) as client:
        assert await client.get("nothing") is None


async def test_an_etcd_that_is_not_there_is_told_of() -> None:
    async with client_of("127.0.0.1:9") as client:
        with pytest.raises(EtcdError, match=r"127.0.0.1:9 cannot be reached"):
            await client.get("nothing")


async def test_what_is_not_an_etcd_is_told_of() -> None:
    async with answering("hello") as server, client_of(server) as client:
        with pytest.raises(EtcdError, match="not as etcd"):
            await client.get("nothing")


async def test_an_answer_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.plugins.router.discovery.etcd_client._MAX_ANSWER_BYTES", 2**20)
    long = "x" * (2**20 + 1)
    async with answering(long) as server, client_of(server) as client:
        with pytest.raises(EtcdError, match="more than 1 MiB"):
            await client.get("nothing")
        with pytest.raises(EtcdError, match="more than 1 MiB"):
            await anext(client.watch("prefix", 1))


async def test_a_server_that_has_lost_the_others_is_passed_over(shared: EtcdServer) -> None:
    async with (
        answering('{"message": "etcdserver: no leader"}', status=503) as lonely,
        client_of(lonely, shared.address) as both,
        client_of(lonely) as client,
    ):
        assert await both.get("nothing") is None
        with pytest.raises(EtcdError, match="no leader"):
            await client.get("nothing")


@asynccontextmanager
async def answering(text: str, status: int = 200) -> AsyncIterator[str]:
    """The address of a server that always says the same."""

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(text=text, status=status)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_host_of_etcd_is_dismissed_through_one_router_for_both(place: Place) -> None:
    host = Host(ScriptedEndpoint("hello"))
    place.register(host.record)
    discover = lambda _: EtcdDiscovery(place.named())  # noqa: E731
    async with Router(discover) as one, Router(discover) as other:
        for router in (one, other):
            await router.until_hosts(1)
        assert one.registry.dismiss(host.identity.id)
        for router in (one, other):
            await router.until_hosts(0)
    await host.close()


# ---- TLS


async def test_hosts_are_found_over_mutual_tls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = Certificates(tmp_path / "own"), Certificates(tmp_path / "other")
    server = EtcdServer(tmp_path / "etcd", own)
    url = f"etcds://{server.address}/pagoda"

    def place(certificates: Certificates, *, shows: bool = True) -> EtcdPlace:
        shown = (certificates.certificate, certificates.key) if shows else (None, None)
        return EtcdPlace.parse(url, "--join", etcd_files(*shown, certificates.authority))

    try:
        view = View(place(own))
        registration = EtcdRegistration(place(own), record("a"))
        await view.until("a")
        await registration.close()
        await view.until()
        await view.close()
        for wrong, reason in (
            (place(other), f"the certificate of {server.address} is not trusted"),
            (place(own, shows=False), "cannot be reached"),
        ):
            stranger = View(wrong)
            await until(lambda reason=reason: reason in caplog.text)
            assert stranger.ids == set()
            await stranger.close()
    finally:
        server.kill()


def test_flags_of_tls_are_checked(tmp_path: Path) -> None:
    own = Certificates(tmp_path)
    files = etcd_files(own.certificate, own.key, own.authority)
    with pytest.raises(ConfigError, match="need --join etcds://"):
        EtcdPlace.parse("etcd://h:1/p", "--join", files)
    with pytest.raises(ConfigError, match="--etcd-key needs --etcd-cert"):
        EtcdPlace.parse("etcds://h:1/p", "--join", etcd_files(None, own.key, None))
    with pytest.raises(ConfigError, match=r"--etcd-cacert: .*/key.pem cannot be used"):
        EtcdPlace.parse("etcds://h:1/p", "--join", etcd_files(None, None, own.key))
