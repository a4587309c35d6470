# SPDX-License-Identifier: Apache-2.0
"""Registry of a router's hosts: hosts that a discovery names, as long as they are alive and do not leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import zmq

from pagoda.concurrency.async_utils import cancel_all, first_of, keep_going
from pagoda.errors import ConfigError, EngineDeadError, EngineLostError, refuse
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.replica import Replica
from pagoda.messages.frontend import HostPool
from pagoda.messages.load import LoadReport
from pagoda.messages.tracing import StartTrace
from pagoda.messages.worker_config import Role
from pagoda.plugins.router.discovery.base import Discovery
from pagoda.plugins.router.host_client import HELLO_TIMEOUT_S, HostClient, Identity, Weigh
from pagoda.plugins.router.host_sockets import HostSockets
from pagoda.plugins.router.host_traces import FetchedTrace
from pagoda.plugins.router.messages import HostRecord, SetRole
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.telemetry.tracer import Tracer

_RETRY_S = 1.0
_REFUSED_RETRY_S = 10.0
_ROLE_PATIENCE_S = 5.0
_DISMISSAL = "It was let go with DELETE /v1/hosts; start it anew to have it back."
_LEFT = "It has finished, and ends."

_NOWHERE = HostPool("")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostReport:
    id: str
    """Empty while only the address is known."""
    address: str
    state: str
    """`connecting`, `refused`, `leaving` (it gets nothing new), or the `ReplicaState` of one that is used."""
    reason: str = ""
    place: HostPool = _NOWHERE
    round_trip_s: float | None = None
    role: Role = Role.NONE
    roles: tuple[Role, ...] = ()
    """Roles that it may be given."""
    since: float | None = None
    """Unix time from which on the host is used."""
    num_requests: int = 0
    load: LoadReport | None = None
    """None if the host does not answer."""


class _NamedHost:
    """A host that is named, or that was named and has not finished."""

    def __init__(self, record: HostRecord) -> None:
        self.record = record
        self.unnamed = asyncio.Event()
        """Set while no discovery names the host."""
        self.client: HostClient | None = None
        """The latest connection to the host."""
        self.host: Replica | None = None
        """The replica at its end; None unless the host is used."""
        self.pool = ""
        """The pool that the host is in."""
        self.since: float | None = None
        self.problem = ""
        self.changed = asyncio.Event()
        """Set when something has changed that decides if the host is used."""
        self.task: asyncio.Task[None] | None = None


class Registry:
    """Connects to hosts that are named, and takes them in; lets go of those that are not named any
    more, that leave, and that are lost.

    Each host goes to the pool of its model. A host of no pool's model or another version is refused, and one that
    would send requests back to this router.
    """

    def __init__(
        self,
        pools: Mapping[str, PrefillDecodeRouter],
        discovery: Discovery,
        sockets: HostSockets,
        router: Identity,
        tracer: Tracer | None = None,
        weigh: Weigh = lambda _place, _round_trip_s: 0,
    ) -> None:
        """`pools` are those that `router` offers, by name. `weigh` is as in `HostClient`."""
        self._tracer = tracer
        self._weigh = weigh
        self._pools = pools
        self._discovery = discovery
        self._sockets = sockets
        self._router = router
        self._entries: dict[HostRecord, _NamedHost] = {}
        self._dismissed: set[str] = set()
        self._order: StartTrace | None = None
        """The trace under way."""
        self._traces: dict[str, FetchedTrace] = {}
        """Traces of hosts, by address."""
        self._first = asyncio.Event()
        self._is_closed = False
        self._block_sizes: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """Hosts in use, by pool and by the block size of their KV caches."""
        self._following = asyncio.create_task(
            keep_going(lambda: discovery.follow(self), "the search for hosts")
        )

    @property
    def num_named(self) -> int:
        return len(self._entries)

    async def first_host(self) -> None:
        await self._first.wait()

    async def close(self) -> None:
        self._is_closed = True  # a timer of the discovery may still tell something
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        await cancel_all([self._following, *tasks])
        await self._discovery.close()

    # ---- traces

    def start_trace(self, order: StartTrace) -> None:
        """All hosts trace from now on, and those that join."""
        self._order = order
        for entry in self._entries.values():
            self._trace(entry)

    def _trace(self, entry: _NamedHost) -> None:
        if self._order is not None and entry.host is not None and entry.client is not None:
            self._traces[entry.record.address] = entry.client.start_trace(self._order)

    async def stop_trace(self) -> list[str]:
        """Brings the fragments of all hosts here; returns sentences about what is missing."""
        traces, self._traces, self._order = self._traces, {}, None
        ends = await asyncio.gather(*(trace.stop() for trace in traces.values()))
        return [problem for problems in ends for problem in problems]

    # ---- for operators

    async def hosts(self) -> list[HostReport]:
        return list(await asyncio.gather(*map(self._report, list(self._entries.values()))))

    def dismiss(self, host_id: str) -> bool:
        """The host gets nothing new, and is let go when it has finished; False if there is none of this id.

        It comes back only when it was started anew.
        """
        entry = self._find(host_id)
        if entry is None:
            return False
        self._dismissed.add(host_id)
        self._tell_dismissed(entry, host_id)
        entry.changed.set()
        return True

    def _find(self, host_id: str) -> _NamedHost | None:
        for entry in self._entries.values():
            known = {entry.record.host_id, entry.host.limits.host_id if entry.host else ""} - {""}
            if host_id in known:
                return entry
        return None

    async def set_role(self, host_id: str, role: Role) -> HostReport | None:
        """Gives the host another role and returns when it has it; None if there is no host of this id.

        Raises InvalidRequestError: the host cannot take this role, EngineDeadError: it is not in use, or ends,
        TimeoutError: it does not do so within some seconds.
        """
        entry = self._find(host_id)
        if entry is None:
            return None
        host, client = entry.host, entry.client
        if host is None or client is None:
            raise EngineDeadError("The host is not in use.")
        if role not in host.limits.roles:
            able = f"{', '.join(host.limits.roles)} at this host" if host.limits.roles else "left"
            refuse(
                "role", f"must be {able}, which was started without --role-changes or is a router"
            )
        changed = asyncio.Event()
        unwatch = host.watch(changed.set)
        client.send(SetRole(role))
        try:
            async with asyncio.timeout(_ROLE_PATIENCE_S):
                while host.limits.role is not role:
                    if host.state is ReplicaState.FAILED:
                        raise EngineDeadError("The host was lost.")
                    changed.clear()
                    await changed.wait()
        finally:
            unwatch()
        return await self._report(entry)

    async def _report(self, entry: _NamedHost) -> HostReport:
        host, since = entry.host, entry.since
        if host is None:
            state = "refused" if entry.problem else "connecting"
            return HostReport(entry.record.host_id, entry.record.address, state, entry.problem)
        load = None
        with contextlib.suppress(TimeoutError, EngineLostError):
            load = await host.load()
        return HostReport(
            host.limits.host_id,
            entry.record.address,
            host.state if self._is_wanted(entry, host) else "leaving",
            place=_NOWHERE if entry.client is None else entry.client.welcome,
            round_trip_s=None if entry.client is None else entry.client.round_trip_s,
            role=host.limits.role,
            roles=host.limits.roles,
            since=since,
            num_requests=0 if entry.host is None else self._pools[entry.pool].num_requests(host),
            load=load,
        )

    # ---- hosts come and go

    def add(self, host: HostRecord) -> None:
        if self._is_closed:
            return
        entry = self._entries.get(host)
        if entry is None:
            entry = self._entries[host] = _NamedHost(host)
            entry.task = asyncio.create_task(self._keep(entry))
        elif entry.unnamed.is_set():
            entry.unnamed.clear()
            entry.changed.set()

    def remove(self, host: HostRecord) -> None:
        entry = self._entries.get(host)
        if entry is not None:
            entry.unnamed.set()
            entry.changed.set()

    async def _keep(self, entry: _NamedHost) -> None:
        """Uses the host whenever it can be, from when it is named until it is not any more."""
        try:
            while not entry.unnamed.is_set():
                retry_s = await self._connect(entry)
                await first_of(asyncio.sleep(retry_s), entry.unnamed.wait())
        finally:
            del self._entries[entry.record]

    async def _connect(self, entry: _NamedHost) -> float:
        """Returns after how many seconds to try again."""
        try:
            client = entry.client = HostClient(
                self._sockets,
                entry.record.address,
                self._router,
                self._tracer,
                hello_timeout_s=HELLO_TIMEOUT_S,
                weigh=self._weigh,
            )
        except zmq.ZMQError as error:
            self._set_problem(
                entry,
                f"The router has no socket for it ({error.strerror}); let it open more files.",
            )
            return _REFUSED_RETRY_S
        host = client.replica
        host.watch(entry.changed.set)
        try:
            return await self._try(entry, host)
        except Exception:
            _log.exception(
                "the host at %s is lost to a failure of the router", entry.record.address
            )
            self._set_problem(entry, "The router failed with it; the router's log says why.")
            return _REFUSED_RETRY_S
        finally:
            await host.close()

    async def _try(self, entry: _NamedHost, host: Replica) -> float:
        """Uses the host as long as it can be; returns after how many seconds to try again."""
        try:
            if await first_of(host.start(), entry.unnamed.wait()) != 0:
                return 0  # it may be named again by now
            entry.pool = "" if entry.client is None else entry.client.welcome.pool
            self._check(entry, host)
            self._set_problem(entry, "")
            await self._use(entry, host)
        except ConfigError as error:
            self._set_problem(entry, str(error))
            return _REFUSED_RETRY_S
        except EngineDeadError as error:
            self._set_problem(entry, str(error))
            return _RETRY_S
        # It may stay until it ends: only then another one can be at its address.
        await first_of(host.wait_failed(), entry.unnamed.wait())
        return _RETRY_S

    def _check(self, entry: _NamedHost, host: Replica) -> None:
        """Raises ConfigError, which gives the reason, if the host cannot be used."""
        limits = host.limits
        if self._router.id in (limits.host_id, *limits.routers):
            raise ConfigError(
                f"At {entry.record.address} is this router itself, or a router that has it among its hosts: "
                "requests would go round in circles."
            )
        if limits.host_id in self._dismissed:
            self._tell_dismissed(entry, limits.host_id)
            raise ConfigError(_DISMISSAL)
        if entry.record.host_id not in ("", limits.host_id):
            raise ConfigError(f"Another host is at {entry.record.address} now.")
        if entry.pool not in self._pools:
            raise ConfigError("The host says that it is in a pool that this router does not have.")
        for block_size in self._block_sizes[entry.pool]:
            if block_size != limits.block_size:
                raise ConfigError(
                    f"The host has KV blocks of {limits.block_size} tokens, and other hosts of this pool "
                    f"{block_size}; give all the same --block-size."
                )

    async def _use(self, entry: _NamedHost, host: Replica) -> None:
        """Uses the host until it is lost, or has finished and gets nothing more.

        Raises ConfigError if the router has got hosts with which this one cannot be used, EngineDeadError if the
        host is lost.
        """
        members, block_size = self._pools[entry.pool], host.limits.block_size
        block_sizes = self._block_sizes[entry.pool]
        block_sizes[block_size] += 1
        try:
            members.add(host)
            entry.host, entry.since = host, time.time()
            self._first.set()
            _log.info("the host at %s has joined", entry.record.address)
            self._trace(entry)
            while host.state is not ReplicaState.FAILED:
                entry.changed.clear()
                if self._is_wanted(entry, host):
                    self._check(entry, host)
                    members.set_leaving(host, False)
                    await entry.changed.wait()
                    continue
                members.set_leaving(host, True)
                if not members.num_requests(host):
                    is_dismissed = host.limits.host_id in self._dismissed
                    self._set_problem(entry, _DISMISSAL if is_dismissed else _LEFT)
                    return
                await first_of(members.emptied(host), entry.changed.wait())
            if not host.is_leaving or members.num_requests(host):
                raise await host.wait_failed()
            self._set_problem(entry, _LEFT)  # it was gone before anybody looked
        finally:
            entry.host = entry.since = None
            block_sizes[block_size] -= 1
            block_sizes += Counter()  # drops block sizes that no host has any more
            members.remove(host)

    def _is_wanted(self, entry: _NamedHost, host: Replica) -> bool:
        is_dismissed = host.limits.host_id in self._dismissed
        return not (entry.unnamed.is_set() or host.is_leaving or is_dismissed)

    def _set_problem(self, entry: _NamedHost, problem: str) -> None:
        if problem == entry.problem:
            return
        entry.problem = problem
        self._discovery.warn(entry.record, problem)
        if problem:
            level = logging.INFO if problem in (_LEFT, _DISMISSAL) else logging.WARNING
            _log.log(level, "the host at %s is not used: %s", entry.record.address, problem)

    def _tell_dismissed(self, entry: _NamedHost, host_id: str) -> None:
        record = msgspec.structs.replace(entry.record, host_id=host_id)
        self._discovery.dismiss(record, _DISMISSAL)
