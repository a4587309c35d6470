"""Hosts stand in a real etcd, which is killed, loses everything, compacts its history; routers follow."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from etcd_server import EtcdServer
from linked_hosts import Host, Router, routed, until
from scripted_endpoint import ScriptedEndpoint

from pagoda.frontend.discovery.addresses import EtcdPlace
from pagoda.frontend.discovery.etcd import EtcdDiscovery, EtcdRegistration
from pagoda.frontend.discovery.etcd_client import EtcdClient, EtcdError
from pagoda.messages.frontend import FinishReason
from pagoda.messages.hosts import HostRecord

PREFIX = "pagoda/tests"


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
        monkeypatch.setattr(f"pagoda.frontend.discovery.etcd.{name}", value)


def place(server: EtcdServer, prefix: str = PREFIX) -> EtcdPlace:
    return EtcdPlace((server.address,), prefix)


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

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.wait([self._following])
        await self.discovery.close()


@asynccontextmanager
async def viewed(at: EtcdPlace) -> AsyncIterator[View]:
    view = View(at)
    try:
        yield view
    finally:
        await view.close()


def record(name: str) -> HostRecord:
    return HostRecord(host_id=name, address="tcp://127.0.0.1:1")


async def overwrite(client: EtcdClient, key: str, value: bytes) -> None:
    """Another value for a key that there is; its lease stays."""
    await client.call("kv/put", {"key": key.encode(), "value": value, "ignore_lease": True}, dict)


async def test_hosts_come_and_go(shared: EtcdServer) -> None:
    at = place(shared, "come-and-go")
    first = EtcdRegistration(at, record("a"))
    async with viewed(at) as view:
        await until(lambda: view.ids == {"a"})
        second = EtcdRegistration(at, record("b"))
        await until(lambda: view.ids == {"a", "b"})
        await first.close()
        await until(lambda: view.ids == {"b"})
        await second.close()
        await until(lambda: view.ids == set())


async def test_a_host_that_does_not_renew_its_lease_is_gone(shared: EtcdServer) -> None:
    at = place(shared, "silent")
    host = EtcdRegistration(at, record("a"))
    async with viewed(at) as view:
        await until(lambda: view.ids == {"a"})
        host.beating.cancel()
        await until(lambda: view.ids == set())
    await host.close()


async def test_prefixes_do_not_mix(shared: EtcdServer) -> None:
    host = EtcdRegistration(place(shared, "one"), record("a"))
    others = [
        EtcdRegistration(place(shared, prefix), record("b")) for prefix in ("onetwo", "one/two")
    ]
    async with viewed(place(shared, "one/two")) as view:
        await until(lambda: view.ids == {"b"})
    async with viewed(place(shared, "one")) as view:
        await until(lambda: view.ids == {"a"})
        late = EtcdRegistration(place(shared, "one/two"), record("c"))
        last = EtcdRegistration(place(shared, "one"), record("d"))
        await until(lambda: len(view.ids) == 2)
        assert view.ids == {"a", "d"}
    for registration in (host, late, last, *others):
        await registration.close()


async def test_what_is_no_host_is_told_of_and_left_out(
    shared: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    at = place(shared, "garbage")
    client = EtcdClient(at.servers)
    lease = await client.grant(60)
    await client.put("garbage/x", b"{}", lease)
    host = EtcdRegistration(at, record("a"))
    async with viewed(at) as view:
        await until(lambda: view.ids == {"a"})
    assert "has no host at garbage/x: Object missing required field" in caplog.text
    await host.close()
    await client.close()


async def test_hosts_stay_while_etcd_is_away_and_others_come_when_it_is_back(
    own: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    host = EtcdRegistration(place(own), record("a"))
    gone = EtcdRegistration(place(own), record("b"))
    async with viewed(place(own)) as view:
        await until(lambda: view.ids == {"a", "b"})
        await asyncio.to_thread(own.kill)
        await gone.close()
        new = EtcdRegistration(place(own), record("c"))
        await until(lambda: "cannot be used" in caplog.text)
        assert view.ids == {"a", "b"}
        await asyncio.to_thread(own.start)
        await until(lambda: view.ids == {"a", "c"})
        await host.close()
        await new.close()


async def test_hosts_are_not_gone_when_etcd_has_lost_everything(own: EtcdServer) -> None:
    host = EtcdRegistration(place(own), record("a"))
    async with viewed(place(own)) as view:
        await until(lambda: view.ids == {"a"})
        await asyncio.to_thread(own.forget)
        await asyncio.to_thread(own.start)
        client = EtcdClient([own.address])
        key = f"{PREFIX}/a"
        async with asyncio.timeout(20):
            while await client.get(key) is None:
                await asyncio.sleep(0.02)
        await client.close()
        await host.close()
        await until(lambda: view.ids == set())
        assert view.num_removed == 1, "a host that was there all the time was withdrawn"


async def test_a_router_goes_on_after_a_compaction(own: EtcdServer) -> None:
    """The events that it missed are not kept any more."""
    at = place(own)
    host = EtcdRegistration(at, record("a"))
    client = EtcdClient(at.servers)
    async with viewed(at) as view:
        await until(lambda: view.ids == {"a"})
        revision = (await client.read(f"{PREFIX}/")).header.revision
        for _ in range(3):
            await overwrite(client, f"{PREFIX}/a", json.dumps(_value("a")).encode())
        body = {"revision": revision + 2, "physical": True}
        await client.call("kv/compaction", body, dict)
        watched = [events async for events in client.watch(f"{PREFIX}/", revision)]
        assert not any(watched)
        await host.close()
        await until(lambda: view.ids == set())
    await client.close()


def _value(name: str) -> dict[str, object]:
    return {"host": {"host_id": name, "address": "tcp://127.0.0.1:1"}}


async def test_a_host_that_was_dismissed_stays_away_from_all(
    shared: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    at = place(shared, "dismissed")
    host = EtcdRegistration(at, record("a"))
    async with viewed(at) as view, viewed(at) as other:
        await until(lambda: view.ids == other.ids == {"a"})
        view.discovery.dismiss(record("a"), "Go.")
        await until(lambda: view.ids == other.ids == set())
        await until(host.beating.done)
        assert "let go by a router" in caplog.text
    await host.close()


async def test_a_host_that_was_late_reads_its_dismissal_all_the_same(
    shared: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    at = place(shared, "late")
    host = EtcdRegistration(at, record("a"))
    async with viewed(at) as view:
        await until(lambda: view.ids == {"a"})
        host.beating.cancel()
        await until(lambda: view.ids == set())  # its lease has run out
        view.discovery.dismiss(record("a"), "Go.")
        await until(lambda: not view.discovery.dismissals)
        await host.beat()
        assert "let go by a router" in caplog.text
        assert view.ids == set()
    await host.close()


async def test_a_host_writes_itself_anew_where_something_else_stands(
    shared: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    at = place(shared, "overwritten")
    host = EtcdRegistration(at, record("a"))
    client = EtcdClient(at.servers)
    async with viewed(at) as view:
        await until(lambda: view.ids == {"a"})
        for garbage in (b"nonsense", b'{"host": "\xff"}', b"[" * 9999):
            await overwrite(client, "overwritten/a", garbage)
            async with asyncio.timeout(20):
                while await client.get("overwritten/a") == garbage:
                    await asyncio.sleep(0.02)
        assert not host.beating.done()
        assert "overwritten/a in etcd at" in caplog.text
    await client.close()
    await host.close()


async def test_a_server_that_does_not_answer_is_passed_over(shared: EtcdServer) -> None:
    client = EtcdClient(["127.0.0.1:9", shared.address])
    assert await client.get("nothing") is None
    await client.close()


async def test_an_etcd_that_is_not_there_is_told_of() -> None:
    client = EtcdClient(["127.0.0.1:9"])
    with pytest.raises(EtcdError, match=r"127.0.0.1:9 cannot be reached"):
        await client.get("nothing")
    await client.close()


async def test_what_is_not_an_etcd_is_told_of() -> None:
    async with answering("hello") as server:
        client = EtcdClient([server])
        with pytest.raises(EtcdError, match="not as etcd"):
            await client.get("nothing")
        await client.close()


async def test_a_server_that_has_lost_the_others_is_passed_over(shared: EtcdServer) -> None:
    async with answering('{"message": "etcdserver: no leader"}', status=503) as lonely:
        client = EtcdClient([lonely, shared.address])
        assert await client.get("nothing") is None
        await client.close()
        client = EtcdClient([lonely])
        with pytest.raises(EtcdError, match="no leader"):
            await client.get("nothing")
        await client.close()


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


async def test_a_router_uses_hosts_of_etcd_also_while_it_is_away(
    own: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    host = Host(ScriptedEndpoint("hello"))
    registration = EtcdRegistration(place(own), host.record)
    async with routed(lambda _: EtcdDiscovery(place(own))) as router:
        await router.until_hosts(1)
        await asyncio.to_thread(own.kill)
        await until(lambda: "hosts stay as they were" in caplog.text)
        assert await router.ask("r1") == ("hello", FinishReason.STOP)
        await host.close()  # its connection tells, whatever etcd says
        await router.until_hosts(0)
        await registration.close()


async def test_a_host_of_etcd_is_dismissed_through_one_router_for_both(own: EtcdServer) -> None:
    host = Host(ScriptedEndpoint("hello"))
    registration = EtcdRegistration(place(own), host.record)
    routers = [Router(lambda _: EtcdDiscovery(place(own))) for _ in range(2)]
    for router in routers:
        await router.until_hosts(1)
    assert routers[0].registry.dismiss(host.identity.id)
    for router in routers:
        await router.until_hosts(0)
    for router in routers:
        await router.close()
    await registration.close()
    await host.close()
