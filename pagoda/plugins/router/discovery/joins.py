# SPDX-License-Identifier: Apache-2.0
"""Hosts join a router: they send it a join message, and repeat it as long as they are there."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

import msgspec
import zmq

from pagoda.concurrency.async_utils import cancel_all, keep_going
from pagoda.errors import ConfigError
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client, encrypt_server
from pagoda.ipc.event_socket import EventSocket, host_socket
from pagoda.messages.worker_config import CurveKeys
from pagoda.plugins.router.discovery.base import (
    BEATS_PER_TTL,
    TTL_S,
    Context,
    Discovery,
    HostListener,
    HostTable,
    Notices,
)
from pagoda.plugins.router.messages import HostJoin, HostRecord, JoinAnswer

_MAX_DISMISSED = 1024
"""Dismissed hosts that are remembered; a host that has heard of its dismissal does not join again."""

_log = logging.getLogger(__name__)


class JoinDiscovery(Discovery):
    """The router's side. A host that sends no join message for `ttl_s` seconds is gone."""

    def __init__(
        self, context: Context, listen: str, keys: CurveKeys, *, ttl_s: float = TTL_S
    ) -> None:
        """Binds `listen`, `host:port`, whose port may be `*`. `context` must have an authenticator.

        Raises ConfigError if `listen` cannot be bound.
        """
        self._ttl_s = ttl_s
        self.hosts = HostTable()
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._problems: dict[str, str] = {}
        self._dismissed: OrderedDict[str, str] = OrderedDict()
        self._decode = Codec[HostJoin](HostJoin).decode
        socket = host_socket(context, zmq.ROUTER)
        encrypt_server(socket, keys)
        self._socket = EventSocket(socket, self._receive, lambda: None)
        try:
            self._socket.bind(f"tcp://{listen}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"--join-listen {listen} cannot be listened on ({error.strerror}); "
                "name another HOST:PORT."
            ) from None
        self.port = self._socket.port
        _log.info(
            "hosts join with --join %s:%d and the same --cluster-key-file",
            listen.rpartition(":")[0],
            self.port,
        )

    async def follow(self, listener: HostListener) -> None:
        self.hosts.listen(listener)
        await asyncio.Event().wait()

    def warn(self, host: HostRecord, problem: str) -> None:
        if host.host_id in self._expiries:
            self._problems[host.host_id] = problem

    def dismiss(self, host: HostRecord, reason: str) -> None:
        self._dismissed[host.host_id] = reason
        if len(self._dismissed) > _MAX_DISMISSED:
            self._dismissed.popitem(last=False)
        self._forget(host.host_id)

    async def close(self) -> None:
        for expiry in self._expiries.values():
            expiry.cancel()
        self._socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        sender, *parts = frames
        try:
            join = self._decode(b"".join(parts))
        except msgspec.DecodeError as error:
            _log.warning("a host sent what is not a message: %s", error)
            return
        self._socket.send(sender, msgspec.msgpack.encode(self.answer(join.host)))

    def answer(self, host: HostRecord) -> JoinAnswer:
        host_id = host.host_id
        if host_id in self._dismissed:
            return JoinAnswer(ttl_s=self._ttl_s, refusal=self._dismissed[host_id], is_final=True)
        if host_id in self._expiries:
            self._expiries[host_id].cancel()
        loop = asyncio.get_running_loop()
        self._expiries[host_id] = loop.call_later(self._ttl_s, self._expire, host_id)
        self.hosts.set(host_id, host)
        return JoinAnswer(ttl_s=self._ttl_s, refusal=self._problems.get(host_id, ""))

    def _expire(self, host_id: str) -> None:
        host = self.hosts.get(host_id)
        _log.info("the host at %s was not heard of for %g s", host and host.address, self._ttl_s)
        self._forget(host_id)

    def _forget(self, host_id: str) -> None:
        self._problems.pop(host_id, None)
        if host_id in self._expiries:
            self._expiries.pop(host_id).cancel()
        self.hosts.set(host_id, None)


class Membership:
    """The host's side, for one router."""

    def __init__(self, context: Context, router: str, keys: CurveKeys, host: HostRecord) -> None:
        self._router = router
        self._host = host
        socket = host_socket(context, zmq.DEALER)
        # While the router is away, at most one join message waits for it. Of several answers the last one counts.
        socket.setsockopt(zmq.CONFLATE, 1)
        encrypt_client(socket, keys)
        self._answer = b""
        self._answered = asyncio.Event()
        self._socket = EventSocket(socket, self._receive)
        self._socket.connect(f"tcp://{router}")
        self._decode = Codec[JoinAnswer](JoinAnswer).decode
        self._notices = Notices(_log)
        self.beating = asyncio.create_task(keep_going(self.beat, f"joining the router at {router}"))
        """Ends when the router has dismissed the host."""

    async def close(self) -> None:
        await cancel_all([self.beating])
        self._socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        self._answer = frames[-1]
        self._answered.set()

    async def _next_answer(self) -> JoinAnswer:
        await self._answered.wait()
        self._answered.clear()
        return self._decode(self._answer)

    async def beat(self) -> None:
        interval_s = TTL_S / BEATS_PER_TTL
        num_unanswered = 0
        while True:
            self._socket.send(msgspec.msgpack.encode(HostJoin(self._host)))
            try:
                async with asyncio.timeout(interval_s):
                    answer = await self._next_answer()
            except TimeoutError:
                num_unanswered += 1
                if num_unanswered == BEATS_PER_TTL:
                    self._notices.warn(
                        f"the router at {self._router} does not answer; it is not there, or has another "
                        "--cluster-key-file"
                    )
                continue
            except msgspec.DecodeError as error:
                self._notices.warn(
                    f"the router at {self._router} answers with what is not a message ({error}); "
                    "install the same version of Pagoda on both"
                )
                await asyncio.sleep(interval_s)
                continue
            num_unanswered = 0
            if answer.is_final:
                self._notices.warn(
                    f"the router at {self._router} let this host go: {answer.refusal}"
                )
                return
            if answer.refusal:
                self._notices.warn(
                    f"the router at {self._router} does not use this host: {answer.refusal}"
                )
            else:
                self._notices.inform(f"joined the router at {self._router}")
            interval_s = answer.ttl_s / BEATS_PER_TTL
            await asyncio.sleep(interval_s)
