# SPDX-License-Identifier: Apache-2.0
"""HTTPS: who is let in, and certificates that change while the server runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from certificates import FLAGS, Certificates

from pagoda.api.auth.file_watch import WatchedFiles
from pagoda.api.auth.keys import EVERY_ROUTE, ApiKey, digest_of
from pagoda.api.auth.keys_file import changed_keys
from pagoda.api.http import listener
from pagoda.api.http.app import ApiServer
from pagoda.api.http.listener import Listener
from pagoda.api.service import ApiConfig, Service
from pagoda.cli.openai_client import OpenAIClient, ServerError
from pagoda.cli.server_process import server_process
from pagoda.errors import ConfigError
from pagoda.ipc.tls import ServerTls, TlsFiles

Serve = Callable[..., Any]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "own")


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server over TLS; gives its URL."""
    runners: list[web.ServerRunner] = []

    async def serve(tls: ServerTls, host: str = "127.0.0.1") -> str:
        runner = web.ServerRunner(ApiServer(Service(ApiConfig("m"))), shutdown_timeout=1.0)
        runners.append(runner)
        await runner.setup()
        site = Listener(runner, host, 0, tls.context)
        await site.start()
        return site.name

    yield serve
    for runner in runners:
        await runner.cleanup()


class Line:
    """One connection to a server."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        host, _, port = url.removeprefix("https://").rpartition(":")
        self._open = partial(asyncio.open_connection, host.strip("[]"), int(port), ssl=context)

    async def __aenter__(self) -> Line:
        self._reader, self._writer = await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    @property
    def certificate(self) -> bytes:
        """The certificate that the server has shown."""
        shown: bytes = self._writer.get_extra_info("ssl_object").getpeercert(True)
        return shown

    async def ask(self) -> bytes:
        self._writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return await self._reader.readuntil(b"}")


async def is_let_in(url: str, context: ssl.SSLContext) -> bool:
    try:
        async with Line(url, context) as line:
            return b"200 OK" in await line.ask()
    except (OSError, asyncio.IncompleteReadError):
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_pages_are_served_over_tls(
    serve: Serve, certificates: Certificates, host: str
) -> None:
    url = await serve(ServerTls(certificates.files(authorities=False)), host)
    assert url.startswith(f"https://[{host}]:" if host == "::1" else f"https://{host}:")
    assert await is_let_in(url, certificates.client_context(shows=False))
    with pytest.raises(ssl.SSLCertVerificationError):
        async with Line(url, ssl.create_default_context()):
            pass


async def test_a_changed_certificate_counts_for_new_connections(
    serve: Serve, certificates: Certificates
) -> None:
    tls = ServerTls(certificates.files(authorities=False))
    watched = WatchedFiles(tls.paths, tls.reload)
    url = await serve(tls)
    context = certificates.client_context(shows=False)
    async with Line(url, context) as old:
        assert b"200 OK" in await old.ask()
        certificates.renew()
        watched.look()
        async with Line(url, context) as new:
            assert b"200 OK" in await new.ask()
            assert new.certificate != old.certificate
        assert b"200 OK" in await old.ask()


async def test_broken_files_leave_the_certificate(
    serve: Serve, certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ServerTls(certificates.files(authorities=False))
    watched = WatchedFiles(tls.paths, tls.reload)
    url = await serve(tls)
    shutil.copy(Certificates(tmp_path / "other").key, certificates.key)
    watched.look()
    [message] = [it.message for it in caplog.records if it.levelname == "ERROR"]
    assert "key values mismatch" in message
    assert message.endswith("What was there before stays in force.")
    assert await is_let_in(url, certificates.client_context(shows=False))


async def test_with_authorities_clients_need_a_certificate(
    serve: Serve, certificates: Certificates, tmp_path: Path
) -> None:
    tls = ServerTls(certificates.files())
    url = await serve(tls)
    other = Certificates(tmp_path / "other")
    stranger = ssl.create_default_context(cafile=str(certificates.authority))
    stranger.load_cert_chain(other.certificate, other.key)

    assert await is_let_in(url, certificates.client_context())
    assert not await is_let_in(url, certificates.client_context(shows=False))
    assert not await is_let_in(url, stranger)
    shutil.copy(other.authority, certificates.authority)
    tls.reload()
    assert await is_let_in(url, stranger)
    own = ssl.create_default_context(cafile=str(certificates.authority))
    own.check_hostname, own.verify_mode = False, ssl.CERT_NONE
    own.load_cert_chain(certificates.certificate, certificates.key)
    assert not await is_let_in(url, own)


async def test_clients_with_certificates_speak_tls_1_3_alone(
    serve: Serve, certificates: Certificates
) -> None:
    """A session of TLS 1.2 could be resumed after its authorities have gone."""
    url = await serve(ServerTls(certificates.files()))
    newest, older = certificates.client_context(), certificates.client_context()
    newest.minimum_version = ssl.TLSVersion.TLSv1_3
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await is_let_in(url, newest)
    assert not await is_let_in(url, older)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_old_versions_are_refused(serve: Serve, certificates: Certificates) -> None:
    url = await serve(ServerTls(certificates.files(authorities=False)))
    context = certificates.client_context(shows=False)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await is_let_in(url, context)
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    assert not await is_let_in(url, context)


async def test_a_handshake_is_bounded_in_time(
    serve: Serve, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE_TIMEOUT_S", 0.05)
    url = await serve(ServerTls(certificates.files(authorities=False)))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        assert await asyncio.wait_for(reader.read(), 20) == b""
    finally:
        writer.close()


async def test_the_client_says_that_a_certificate_is_not_trusted(
    serve: Serve, certificates: Certificates
) -> None:
    url = await serve(ServerTls(certificates.files(authorities=False)))
    async with OpenAIClient(url) as client:
        with pytest.raises(ConfigError, match="--ssl-ca-certs"):
            await client.first_model()


def test_files_that_cannot_be_used_are_named(certificates: Certificates, tmp_path: Path) -> None:
    own = certificates.files()
    garbage, missing = tmp_path / "garbage", tmp_path / "missing"
    garbage.write_text("no certificate")
    other = Certificates(tmp_path / "other")
    for files, problem in (
        (TlsFiles(None, own.key, None, FLAGS), "--ssl-keyfile needs --ssl-certfile"),
        (TlsFiles(None, None, own.authorities, FLAGS), "--ssl-ca-certs needs --ssl-certfile"),
        (TlsFiles(missing, own.key, None, FLAGS), "--ssl-certfile: .*/missing.* cannot be used"),
        (TlsFiles(garbage, own.key, None, FLAGS), "--ssl-certfile: .*/garbage.* cannot be used"),
        (TlsFiles(own.certificate, None, None, FLAGS), r"--ssl-certfile: .* cannot be used"),
        (TlsFiles(own.certificate, other.key, None, FLAGS), "--ssl-keyfile: .*mismatch"),
        (TlsFiles(own.certificate, own.key, missing, FLAGS), "--ssl-ca-certs: .*/missing cannot"),
        (TlsFiles(own.certificate, own.key, garbage, FLAGS), "--ssl-ca-certs: .*/garbage cannot"),
    ):
        with pytest.raises(ConfigError, match=problem):
            ServerTls(files)


async def ask_for_ever(client: OpenAIClient) -> None:
    while True:
        await client.first_model()


async def test_a_server_process_takes_keys_and_certificates_that_change(
    certificates: Certificates, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    with changed_keys(keys) as listed:
        listed.append(ApiKey(name="a", sha256=digest_of("k"), scopes=EVERY_ROUTE))
    flags = [
        *("--executor", "sim", "--host", "::1", "--api-keys-file", str(keys)),
        *("--ssl-certfile", str(certificates.certificate), "--ssl-keyfile", str(certificates.key)),
    ]
    with server_process(flags) as server:
        assert server.base_url.startswith("https://[::1]:")
        context = certificates.client_context(shows=False)
        async with OpenAIClient(server.base_url, "k", context) as client:
            await client.first_model()
            async with Line(server.base_url, context) as line:
                first = line.certificate
            certificates.renew()
            while True:
                async with Line(server.base_url, context) as line:
                    if line.certificate != first:
                        break
            with changed_keys(keys) as listed:
                listed.clear()
            with pytest.raises(ServerError, match="status 401"):
                await ask_for_ever(client)
