# SPDX-License-Identifier: Apache-2.0
"""Hosts write themselves into an etcd, and routers read it: all of these have one view.

A key is `PREFIX/HOST_ID`, and hangs on a lease that the host renews; what is further below belongs to others.
While etcd is away, hosts stay as they were known last; afterwards they have the time of a lease to say that they
are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from pagoda.concurrency.async_utils import cancel_all, first_of, keep_going
from pagoda.ipc.tls import TlsFiles
from pagoda.plugins.router.discovery.base import (
    BEATS_PER_TTL,
    TTL_S,
    Discover,
    Discovery,
    DiscoveryPlugin,
    HostListener,
    HostTable,
    Notices,
    Register,
)
from pagoda.plugins.router.discovery.etcd_client import EtcdClient, EtcdError, Event, KeyValue
from pagoda.plugins.router.discovery.etcd_place import EtcdPlace
from pagoda.plugins.router.messages import HostRecord

_RETRY_S = 0.5
_LOOK_S = 2.0
"""Seconds after which a router without events checks that etcd is there."""
_LAST_WORD_S = 1.0
_DISMISSAL_S = 3600.0
"""Seconds that a dismissal waits for its host, which may be cut off from etcd."""

_log = logging.getLogger(__name__)


class _Value(msgspec.Struct, frozen=True):
    host: HostRecord
    dismissal: str = ""
    """Written by a router, under a lease of its own: why the host is not to come back."""


class EtcdDiscovery(Discovery):
    """The router's side. A host is not warned: another router may well use it."""

    def __init__(self, place: EtcdPlace) -> None:
        self._prefix = f"{place.prefix}/"
        self._client = EtcdClient(place.servers, place.tls)
        self._notices = Notices(_log)
        self._hosts = HostTable()
        self._absent: set[str] = set()
        """Keys that were gone when etcd was back; dropped after the time of a lease."""
        self._forgetting: asyncio.TimerHandle | None = None
        self.dismissals: dict[str, asyncio.Task[None]] = {}

    async def follow(self, listener: HostListener) -> None:
        self._hosts.listen(listener)
        while True:
            try:
                await self._follow_once()
            except EtcdError as error:
                self._notices.warn(
                    f"{self._client.name} cannot be used: {error}; hosts stay as they were"
                )
            await asyncio.sleep(_RETRY_S)

    def dismiss(self, host: HostRecord, reason: str) -> None:
        if host.host_id not in self.dismissals:
            task = asyncio.create_task(self._dismiss(host, reason))
            self.dismissals[host.host_id] = task
            task.add_done_callback(lambda _: self.dismissals.pop(host.host_id, None))

    async def close(self) -> None:
        if self._forgetting is not None:
            self._forgetting.cancel()
        await cancel_all(list(self.dismissals.values()))
        await self._client.close()

    async def _follow_once(self) -> None:
        """Reads all hosts, then watches them until the watch ends."""
        listing = await self._client.read(self._prefix)
        self._notices.inform(f"hosts are found in {self._client.name}, under {self._prefix}")
        self._take_listing(listing.kvs)
        await first_of(self._watch(listing.header.revision + 1), self._look())

    async def _watch(self, revision: int) -> None:
        async with contextlib.aclosing(self._client.watch(self._prefix, revision)) as watch:
            async for events in watch:
                self._take_events(events)

    async def _look(self) -> None:
        """A watch says nothing when nothing happens, nor when the line is cut."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._client.get(self._prefix)

    async def _dismiss(self, host: HostRecord, reason: str) -> None:
        """Repeats until etcd has the dismissal; also for a host that is not there, which may come back."""
        key = self._prefix + host.host_id
        value = msgspec.json.encode(_Value(host, reason))
        lease: str | None = None
        while True:
            with contextlib.suppress(EtcdError):
                lease = lease or await self._client.grant(_DISMISSAL_S)
                await self._client.put(key, value, lease)
                return
            await asyncio.sleep(_RETRY_S)

    def _take_listing(self, kvs: list[KeyValue]) -> None:
        self._absent = self._hosts.keys() - {_name(kv) for kv in kvs}
        for kv in kvs:
            self._hosts.set(_name(kv), self._read(kv))
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = asyncio.get_running_loop().call_later(TTL_S, self._forget_absent)

    def _forget_absent(self) -> None:
        for key in self._absent:
            self._hosts.set(key, None)
        self._absent.clear()

    def _take_events(self, events: list[Event]) -> None:
        for event in events:
            key = _name(event.kv)
            self._absent.discard(key)
            self._hosts.set(key, None if event.kind == "DELETE" else self._read(event.kv))

    def _read(self, kv: KeyValue) -> HostRecord | None:
        """The host at a key; a value that cannot be read changes nothing."""
        before = self._hosts.get(_name(kv))
        if "/" in _name(kv).removeprefix(self._prefix):
            return before  # the key belongs to a longer prefix
        try:
            value = msgspec.json.decode(kv.value, type=_Value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _log.warning("%s has no host at %s: %s", self._client.name, _name(kv), error)
            return before
        return None if value.dismissal else value.host


def _name(kv: KeyValue) -> str:
    return kv.key.decode("utf-8", "replace")


class EtcdRegistration:
    """The host's side."""

    def __init__(self, place: EtcdPlace, host: HostRecord) -> None:
        self._key = f"{place.prefix}/{host.host_id}"
        self._value = msgspec.json.encode(_Value(host))
        self._client = EtcdClient(place.servers, place.tls)
        self._notices = Notices(_log)
        self._lease: str | None = None
        self.beating = asyncio.create_task(
            keep_going(self.beat, f"registering in {self._client.name}")
        )
        """Ends when a router has dismissed the host."""

    async def close(self) -> None:
        await cancel_all([self.beating])
        with contextlib.suppress(EtcdError, TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self._end_lease()
        await self._client.close()

    async def beat(self) -> None:
        while True:
            try:
                dismissal = await self._renew()
                if dismissal:
                    self._notices.warn(
                        f"let go by a router, through {self._client.name}: {dismissal}"
                    )
                    await self._end_lease()
                    return
                self._notices.inform(f"registered in {self._client.name}, at {self._key}")
            except EtcdError as error:
                self._notices.warn(f"{self._client.name} cannot be used: {error}")
            await asyncio.sleep(TTL_S / BEATS_PER_TTL)

    async def _renew(self) -> str:
        """Makes sure that the host stands there; returns why it is not to, or nothing."""
        is_new = False
        if self._lease is not None and not await self._client.keep_alive(self._lease):
            self._lease = None
        if self._lease is None:
            self._lease = await self._client.grant(TTL_S)
            is_new = True
        written = await self._client.get(self._key)
        value = None if written is None else self._decode(written)
        if value is not None and value.dismissal:
            return value.dismissal
        if value is None or is_new:
            await self._client.put(self._key, self._value, self._lease)
        return ""

    def _decode(self, written: bytes) -> _Value | None:
        try:
            return msgspec.json.decode(written, type=_Value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._notices.warn(f"{self._key} in {self._client.name} was no host ({error})")
            return None

    async def _end_lease(self) -> None:
        if self._lease is not None:
            await self._client.revoke(self._lease)
            self._lease = None


def _discover(url: str, flag: str, files: TlsFiles) -> Discover:
    place = EtcdPlace.parse(url, flag, files)
    return lambda _context: EtcdDiscovery(place)


def _register(url: str, flag: str, files: TlsFiles) -> Register:
    place = EtcdPlace.parse(url, flag, files)
    return lambda _context, host: [EtcdRegistration(place, host)]


ETCD = DiscoveryPlugin(_discover, _register)
