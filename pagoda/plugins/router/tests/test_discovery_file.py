# SPDX-License-Identifier: Apache-2.0
"""Hosts stand in a file, which changes, goes wrong, and is right again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from linked_hosts import Host, Router, until, until_refused
from scripted_endpoint import ScriptedEndpoint

from pagoda.concurrency.async_utils import first_of
from pagoda.errors import ConfigError
from pagoda.ipc.curve import keys_of
from pagoda.messages.frontend import FinishReason
from pagoda.plugins.router.discovery.hosts_file import FileDiscovery, read_hosts


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.plugins.router.discovery.hosts_file._LOOK_S", 0.02)
    monkeypatch.setattr("pagoda.plugins.router.registry._RETRY_S", 0.05)
    monkeypatch.setattr("pagoda.plugins.router.registry._REFUSED_RETRY_S", 0.05)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


def test_empty_lines_and_comments_do_not_count(path: Path) -> None:
    path.write_text("# pool 1\n\n10.0.0.1:5601  # the old one\n node-2.example:05602\n")
    assert list(read_hosts(path)) == [
        "tcp://10.0.0.1:5601",
        "tcp://node-2.example:5602",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a:1\nb\n", r"line 2, must be HOST:PORT, .* got 'b'"),
        ("a:1\n\nb:x\n", r"line 3, must be HOST:PORT"),
        ("a:0\n", r"line 1, must be HOST:PORT"),
        ("a:65536\n", r"line 1, must be HOST:PORT"),
        (":5\n", r"line 1, must be HOST:PORT"),
        ("http://a:5\n", r"line 1, must be HOST:PORT"),
        ("a:1\nb:1\na:01\n", r"line 3, names a:01 a second time"),
        ("10.0.0.1:5601\n10.0.0.2:56", r"must end with a line break"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(path: Path, text: str, reason: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        FileDiscovery(path)


def test_a_file_that_is_not_there_or_no_text_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        FileDiscovery(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot be read \(it is not UTF-8"):
        FileDiscovery(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"cannot be read \(it is not a regular file"):
        FileDiscovery(path)


async def test_hosts_follow_the_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosts = [Host(ScriptedEndpoint(answer)) for answer in ("first", "second")]
    path.write_text(f"{hosts[0].address}\n")
    async with Router(lambda _: FileDiscovery(path)) as router:
        await router.until_hosts(1)
        assert await router.ask("r1") == ("first", FinishReason.STOP)
        path.write_text(f"{hosts[0].address}\n{hosts[1].address}\n")
        await router.until_hosts(2)
        path.write_text(f"{hosts[1].address}\noops\n")
        await until(lambda: "line 2, must be HOST:PORT" in caplog.text)
        path.unlink()
        await until(lambda: "No such file" in caplog.text)
        path.write_text("# none\n")
        await until(lambda: "lists no host any more" in caplog.text)
        assert len(router.dispatcher.replicas) == 2
        path.write_text(f"{hosts[1].address}\n")
        await router.until_hosts(1)
        assert await router.ask("r2") == ("second", FinishReason.STOP)
    for host in hosts:
        await host.close()


async def test_a_host_that_is_not_listed_any_more_finishes_what_it_has(path: Path) -> None:
    endpoint = ScriptedEndpoint("abcdef")
    endpoint.pause_after = 2
    host = Host(endpoint)
    path.write_text(f"{host.address}\n")
    async with Router(lambda _: FileDiscovery(path)) as router:
        await router.until_hosts(1)
        asking = asyncio.create_task(router.ask("r1"))
        await endpoint.paused.wait()
        path.write_text("127.0.0.1:9\n")
        await until(lambda: next(iter(router.dispatcher.slots)).fitness is None)
        path.write_text(f"{host.address}\n")  # and back, before it has finished
        await until(lambda: next(iter(router.dispatcher.slots)).fitness is not None)
        path.write_text("127.0.0.1:9\n")
        await until(lambda: next(iter(router.dispatcher.slots)).fitness is None)
        endpoint.go_on.set()
        assert await asking == ("abcdef", FinishReason.STOP)
        await router.until_hosts(0)
    await host.close()


async def test_a_dismissed_host_comes_back_only_when_it_was_started_anew(path: Path) -> None:
    host = Host(ScriptedEndpoint("old"))
    path.write_text(f"{host.address}\n")
    async with Router(lambda _: FileDiscovery(path)) as router:
        await router.until_hosts(1)
        assert not router.registry.dismiss("nobody")
        assert router.registry.dismiss(host.identity.id)
        await router.until_hosts(0)
        path.write_text("127.0.0.1:9\n")
        await until(lambda: router.registry.num_named == 1 and not router.dispatcher.replicas)
        path.write_text(f"{host.address}\n")
        [report] = await until_refused(router)
        assert (report.state, report.reason[:15]) == ("refused", "It was let go w")
        await host.close()
        again = Host(ScriptedEndpoint("new"), port=host.address.rpartition(":")[2])
        await router.until_hosts(1)
        await again.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_digest": "2"}, "another model or another version of it"),
        ({"keys": keys_of(b"some other secret")}, "has another --cluster-key-file"),
    ],
)
async def test_another_model_or_key_is_refused_with_the_reason(
    path: Path, fields: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(ScriptedEndpoint("ok"), **fields)  # type: ignore[arg-type]
    path.write_text(f"{host.address}\n")
    async with Router(lambda _: FileDiscovery(path)) as router:
        await until(lambda: reason in caplog.text)
        assert router.dispatcher.replicas == []
    await host.close()


class _Relay:
    """Between a router and a host; a cut line is silent, and nobody hangs up."""

    def __init__(self) -> None:
        self.flows = asyncio.Event()
        self.flows.set()
        self.address = ""
        self._target = ""
        self._server: asyncio.Server

    async def start(self, target: str) -> None:
        self._target = target
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await first_of(self._carry(reader, far_writer), self._carry(far_reader, writer))
        far_writer.close()
        writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self.flows.wait()
            writer.write(data)

    def close(self) -> None:
        self.flows.set()
        self._server.close()


async def test_a_host_whose_line_is_cut_is_lost_and_found_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.ipc.event_socket.HEARTBEAT_S", 0.1)
    monkeypatch.setattr("pagoda.ipc.event_socket.SILENCE_S", 0.3)
    cut, whole = Host(scripted := _resuming("abcdef")), Host(_resuming("abcdef"))
    relay = _Relay()
    await relay.start(cut.address)
    path.write_text(f"{relay.address}\n")
    async with Router(lambda _: FileDiscovery(path)) as router:
        await router.until_hosts(1)
        scripted.pause_after = 3
        asking = asyncio.create_task(router.ask("r1"))
        await scripted.paused.wait()
        path.write_text(f"{relay.address}\n{whole.address}\n")
        await router.until_hosts(2)
        relay.flows.clear()
        assert await asking == ("abcdef", FinishReason.STOP)
        await router.until_hosts(1)
        await until(lambda: scripted.aborted == ["r1"])  # the host has noticed, too
        relay.flows.set()
        await router.until_hosts(2)
    relay.close()
    await cut.close()
    await whole.close()


def _resuming(answer: str) -> ScriptedEndpoint:
    return ScriptedEndpoint(lambda request: answer[len(request.output_token_ids) :])
