# SPDX-License-Identifier: Apache-2.0
"""Client of etcd 3.4 and later, over its JSON gateway: leases, keys, watches.

https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/; bytes are in base64, numbers may come as strings.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence, Sized
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Generic, TypeVar

import aiohttp
import msgspec

_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 2**26
"""Bytes of an answer, or of one line of a watch. A host takes some hundred."""
_CONTENT = {"Content-Type": "application/json"}

T = TypeVar("T")


class EtcdError(Exception):
    """An etcd cannot be reached, or does not do what it was asked; a clause says why."""


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes = b""


class Event(msgspec.Struct, frozen=True):
    kv: KeyValue
    kind: str = msgspec.field(name="type", default="PUT")


class _Header(msgspec.Struct, frozen=True):
    revision: int


class Listing(msgspec.Struct, frozen=True):
    """Keys at one revision."""

    header: _Header
    kvs: list[KeyValue] = []


class _Granted(msgspec.Struct, frozen=True):
    lease: str = msgspec.field(name="ID")


class _Watched(msgspec.Struct, frozen=True):
    events: list[Event] = []
    canceled: bool = False


class _KeptAlive(msgspec.Struct, frozen=True):
    ttl_s: int = msgspec.field(name="TTL", default=0)


class _Streamed(msgspec.Struct, Generic[T], frozen=True):
    result: T


class _Problem(msgspec.Struct, frozen=True):
    message: str = "it gave no reason"


class EtcdClient:
    """One etcd, of one server or of several. Belongs to one event loop."""

    def __init__(self, servers: Sequence[str], tls: ssl.SSLContext | None = None) -> None:
        """`servers` are `host:port`; the next one is asked when one does not answer. `tls` is for https."""
        self.name = f"etcd at {','.join(servers)}"
        self._servers = list(servers)
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def grant(self, ttl_s: float) -> str:
        """A new lease. Raises EtcdError if etcd refuses or does not answer."""
        granted = await self.call("lease/grant", {"TTL": max(1, round(ttl_s))}, _Granted)
        return granted.lease

    async def keep_alive(self, lease: str) -> bool:
        """Renews a lease; False if there is none any more."""
        kept = await self.call("lease/keepalive", {"ID": lease}, _Streamed[_KeptAlive])
        return kept.result.ttl_s > 0

    async def revoke(self, lease: str) -> None:
        """Ends a lease, and deletes the keys that hang on it."""
        await self.call("lease/revoke", {"ID": lease}, dict)

    async def put(self, key: str, value: bytes, lease: str) -> None:
        await self.call("kv/put", {"key": key.encode(), "value": value, "lease": lease}, dict)

    async def get(self, key: str) -> bytes | None:
        listing = await self.call("kv/range", {"key": key.encode()}, Listing)
        return listing.kvs[0].value if listing.kvs else None

    async def read(self, prefix: str) -> Listing:
        """All keys that begin with `prefix`, which is not empty."""
        return await self.call("kv/range", _range(prefix), Listing)

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[list[Event], None]:
        """Events of keys that begin with `prefix`, from `revision` on, until etcd ends the watch."""
        body = {"create_request": {**_range(prefix), "start_revision": revision}}
        rest = b""
        async with self._post("watch", body, total_s=None) as response:
            try:
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    _check_size(rest)
                    for line in filter(None, lines):
                        watched = _decode(line, _Streamed[_Watched]).result
                        if watched.canceled:
                            return
                        yield watched.events
            except aiohttp.ClientError:
                raise EtcdError("the connection broke") from None

    async def call(self, path: str, body: object, kind: type[T]) -> T:
        async with self._post(path, body, total_s=_TIMEOUT_S) as response:
            try:
                return _decode(await _read(response), kind)
            except (aiohttp.ClientError, TimeoutError):
                raise EtcdError("the connection broke") from None

    @asynccontextmanager
    async def _post(
        self, path: str, body: object, *, total_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer of the first server that gives one, from the one on that did so last."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        scheme = "http" if self._tls is None else "https"
        problem = ""
        for _ in range(len(self._servers)):
            try:
                response = await self._session.post(
                    f"{scheme}://{self._servers[0]}/v3/{path}",
                    data=msgspec.json.encode(body),
                    headers=_CONTENT,
                    ssl=True if self._tls is None else self._tls,
                    timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=_TIMEOUT_S),
                )
            except aiohttp.ClientConnectorCertificateError:
                problem = problem or f"the certificate of {self._servers[0]} is not trusted"
            except (aiohttp.ClientError, TimeoutError):
                problem = problem or f"{' and '.join(self._servers)} cannot be reached"
            else:
                async with response:
                    if response.status == HTTPStatus.OK:
                        yield response
                        return
                    problem = await _problem_of(response)
                    if response.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                        raise EtcdError(problem)
            # It is away, or cut off from the others.
            self._servers.append(self._servers.pop(0))
        raise EtcdError(problem)


async def _problem_of(response: aiohttp.ClientResponse) -> str:
    try:
        return _decode(await _read(response), _Problem).message
    except (aiohttp.ClientError, TimeoutError):
        return "the connection broke"


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole answer. Raises EtcdError: it is too long."""
    answer = bytearray()
    async for piece in response.content.iter_any():
        answer += piece
        _check_size(answer)
    return bytes(answer)


def _check_size(answer: Sized) -> None:
    if len(answer) > _MAX_ANSWER_BYTES:
        raise EtcdError(f"it answers with more than {_MAX_ANSWER_BYTES >> 20} MiB")


def _decode(payload: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(payload, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EtcdError("it answers, but not as etcd 3.4 and later do") from None


def _range(prefix: str) -> dict[str, object]:
    first = prefix.encode()
    return {"key": first, "range_end": first[:-1] + bytes([first[-1] + 1])}
