"""Hosts say to each router that they are there, and go on saying so as long as they are."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

import msgspec
import zmq
import zmq.asyncio

from pagoda.errors import ConfigError
from pagoda.frontend.async_utils import cancel_all, keep_going
from pagoda.frontend.discovery.base import BEATS_PER_TTL, TTL_S, Notices, Tell
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client, encrypt_server
from pagoda.ipc.heartbeat import notice_silence
from pagoda.messages.hosts import HostJoin, HostRecord, JoinAnswer
from pagoda.messages.worker_config import CurveKeys

_MAX_MESSAGE_BYTES = 2**16
_MAX_DISMISSED = 1024
"""Hosts of which it is remembered that they are not to come back; one that has heard it does not."""

_log = logging.getLogger(__name__)


class JoinDiscovery:
    """The router's side: hosts that fell silent are gone."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        listen: str,
        keys: CurveKeys,
        *,
        ttl_s: float = TTL_S,
    ) -> None:
        """Binds `listen`, `host:port`, whose port may be `*`. `context` must have an authenticator.

        Raises:
            ConfigError: it cannot be bound.
        """
        self._ttl_s = ttl_s
        self._hosts: dict[str, HostRecord] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._problems: dict[str, str] = {}
        self._dismissed: OrderedDict[str, str] = OrderedDict()
        self._tell: Tell = _tell_nobody
        self._decode = Codec[HostJoin](HostJoin).decode
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        notice_silence(self._socket)
        encrypt_server(self._socket, keys)
        try:
            self._socket.bind(f"tcp://{listen}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"--join-listen {listen} cannot be listened on ({error.strerror}); "
                "name another HOST:PORT."
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        _log.info(
            "hosts join with --join %s:%d and the same --cluster-key-file",
            listen.rpartition(":")[0],
            self.port,
        )

    async def follow(self, tell: Tell) -> None:
        self._tell = tell
        while True:
            sender, *parts = await self._socket.recv_multipart()
            try:
                join = self._decode(b"".join(parts))
            except msgspec.DecodeError as error:
                _log.warning("a host sent what is not a message: %s", error)
                continue
            answer = self._take(join.host)
            await self._socket.send_multipart([sender, msgspec.msgpack.encode(answer)])

    def warn(self, host: HostRecord, problem: str) -> None:
        if host.host_id in self._hosts:
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

    def _take(self, host: HostRecord) -> JoinAnswer:
        host_id = host.host_id
        if host_id in self._dismissed:
            return JoinAnswer(ttl_s=self._ttl_s, refusal=self._dismissed[host_id], is_final=True)
        if host_id in self._expiries:
            self._expiries[host_id].cancel()
        loop = asyncio.get_running_loop()
        self._expiries[host_id] = loop.call_later(self._ttl_s, self._expire, host_id)
        if self._hosts.get(host_id) != host:
            self._hosts[host_id] = host
            self._tell(self._hosts.values())
        return JoinAnswer(ttl_s=self._ttl_s, refusal=self._problems.get(host_id, ""))

    def _expire(self, host_id: str) -> None:
        _log.info(
            "the host at %s was not heard of for %g s", self._hosts[host_id].address, self._ttl_s
        )
        self._forget(host_id)

    def _forget(self, host_id: str) -> None:
        if self._hosts.pop(host_id, None) is None:
            return
        self._problems.pop(host_id, None)
        self._expiries.pop(host_id).cancel()
        self._tell(self._hosts.values())


def _tell_nobody(_: object) -> None:
    pass


class Membership:
    """The host's side, for one router."""

    def __init__(
        self, context: zmq.asyncio.Context, router: str, keys: CurveKeys, host: HostRecord
    ) -> None:
        """`router` is `host:port`."""
        self._router = router
        self._host = host
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        # While the router is away no more than one join waits for it, and of its answers the last one counts.
        self._socket.setsockopt(zmq.CONFLATE, 1)
        notice_silence(self._socket)
        encrypt_client(self._socket, keys)
        self._socket.connect(f"tcp://{router}")
        self._decode = Codec[JoinAnswer](JoinAnswer).decode
        self._notices = Notices(_log)
        self._beating = asyncio.create_task(
            keep_going(self._beat, f"joining the router at {router}")
        )

    async def close(self) -> None:
        await cancel_all([self._beating])
        self._socket.close()

    async def _beat(self) -> None:
        interval_s = TTL_S / BEATS_PER_TTL
        num_unanswered = 0
        while True:
            await self._socket.send(msgspec.msgpack.encode(HostJoin(self._host)))
            try:
                async with asyncio.timeout(interval_s):
                    answer = self._decode(await self._socket.recv())
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
