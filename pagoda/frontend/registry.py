"""Which hosts a router has: they say so themselves, and go on saying so as long as they live."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio

from pagoda.engine.messages import (
    PROTOCOL_VERSION,
    CurveKeys,
    HostJoin,
    HostLeave,
    HostMessage,
    JoinAnswer,
)
from pagoda.errors import ConfigError, EngineDeadError
from pagoda.frontend.host_link import RemoteHost
from pagoda.frontend.merge import cancel_all
from pagoda.frontend.pods import Members
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client, encrypt_server

TTL_S = 5.0
"""A host that was not heard of for so long is gone."""
_BEATS_PER_TTL = 4
_MAX_MESSAGE_BYTES = 2**16

_log = logging.getLogger(__name__)


class _Entry:
    """A host that has joined."""

    def __init__(self, host: RemoteHost) -> None:
        self.host = host
        self.expiry: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None


class Registry:
    """Takes in hosts of one model, and lets go of those that leave, hang up or fall silent."""

    def __init__(
        self,
        members: Members,
        context: zmq.asyncio.Context,
        address: str,
        keys: CurveKeys,
        *,
        model: str,
        model_digest: str,
        ttl_s: float = TTL_S,
    ) -> None:
        """Binds `address`, whose port may be `*`. `context` must have a doorkeeper.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._members = members
        self._context = context
        self._keys = keys
        self._model = model
        self._model_digest = model_digest
        self._ttl_s = ttl_s
        self._entries: dict[str, _Entry] = {}
        self._first = asyncio.Event()
        self._ends: set[asyncio.Task[None]] = set()
        self._decode = Codec[HostMessage](HostMessage).decode
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        encrypt_server(self._socket, keys)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"--join-listen {address.removeprefix('tcp://')} cannot be listened on ({error.strerror}); "
                "name another HOST:PORT."
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._serving = asyncio.create_task(self._serve())

    async def first_host(self) -> None:
        """Returns when a host has joined."""
        await self._first.wait()

    async def close(self) -> None:
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for entry in self._entries.values():
            if entry.expiry is not None:
                entry.expiry.cancel()
        await cancel_all([self._serving, *tasks])
        for host_id in list(self._entries):
            self._drop(host_id, "was let go")
        await asyncio.gather(*self._ends)
        self._socket.close()

    # ---- what hosts say

    async def _serve(self) -> None:
        while True:
            sender, payload = await self._socket.recv_multipart()
            try:
                message = self._decode(payload)
            except msgspec.DecodeError as error:
                _log.warning("a host sent what is not a message: %s", error)
                continue
            match message:
                case HostJoin():
                    answer = self._take_join(message)
                    await self._socket.send_multipart([sender, msgspec.msgpack.encode(answer)])
                case HostLeave():
                    self._let_leave(message.host_id)

    def _take_join(self, join: HostJoin) -> JoinAnswer:
        refusal = self._refusal_of(join)
        if refusal:
            return JoinAnswer(refusal=refusal)
        entry = self._entries.get(join.host_id)
        if entry is None:
            host = RemoteHost(self._context, join.address, self._keys)
            entry = self._entries[join.host_id] = _Entry(host)
            entry.task = asyncio.create_task(self._take_in(join, entry))
        if entry.expiry is not None:
            entry.expiry.cancel()
        silent = f"was not heard of for {self._ttl_s:g} s"
        entry.expiry = asyncio.get_running_loop().call_later(
            self._ttl_s, self._drop, join.host_id, silent
        )
        return JoinAnswer(ttl_s=self._ttl_s)

    def _refusal_of(self, join: HostJoin) -> str:
        if join.protocol_version != PROTOCOL_VERSION:
            return (
                f"This router speaks protocol {PROTOCOL_VERSION}, the host {join.protocol_version}; "
                "install the same version of Pagoda on both."
            )
        if join.model_digest != self._model_digest:
            return (
                f"This router serves {self._model}, and {join.model} is another model or another version of it; "
                "serve the same files."
            )
        return ""

    async def _take_in(self, join: HostJoin, entry: _Entry) -> None:
        """From its first word until it is gone."""
        host = entry.host
        try:
            await host.start()
        except (ConfigError, EngineDeadError) as error:
            _log.warning("a host that wants to join cannot be used: %s", error)
            self._drop(join.host_id, "did not answer")
            return
        self._members.add(host)
        self._first.set()
        _log.info("the host at %s has joined", host.address)
        await host.wait_failed()
        self._drop(join.host_id, "hung up")

    def _let_leave(self, host_id: str) -> None:
        entry = self._entries.get(host_id)
        if entry is not None:
            _log.info("the host at %s leaves", entry.host.address)
            self._members.release(entry.host)

    def _drop(self, host_id: str, reason: str) -> None:
        entry = self._entries.pop(host_id, None)
        if entry is None:
            return
        _log.info("the host at %s %s", entry.host.address, reason)
        if entry.expiry is not None:
            entry.expiry.cancel()
        self._members.remove(entry.host)
        entry.host.lose(reason)
        end = asyncio.create_task(entry.host.close())
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)


class Membership:
    """A host's word to one router: says that it is there, until it leaves."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        router: str,
        keys: CurveKeys,
        join: HostJoin,
    ) -> None:
        """`router` is `host:port`."""
        self._router = router
        self._join = join
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        encrypt_client(self._socket, keys)
        self._socket.connect(f"tcp://{router}")
        self._beating = asyncio.create_task(self._beat())

    async def leave(self) -> None:
        """The router gives the host nothing new from now on."""
        await cancel_all([self._beating])
        await self._socket.send(msgspec.msgpack.encode(HostLeave(self._join.host_id)))
        self._beating = asyncio.create_task(self._beat())  # what runs there is still its own

    async def close(self) -> None:
        await cancel_all([self._beating])
        self._socket.close()

    async def _beat(self) -> None:
        interval_s = TTL_S / _BEATS_PER_TTL
        has_answered, num_unanswered = False, 0
        while True:
            await self._socket.send(msgspec.msgpack.encode(self._join))
            try:
                async with asyncio.timeout(interval_s):
                    payload = await self._socket.recv()
            except TimeoutError:
                num_unanswered += 1
                if num_unanswered == _BEATS_PER_TTL:
                    _log.warning(
                        "the router at %s does not answer; it is not there, or has another --cluster-key-file",
                        self._router,
                    )
                continue
            num_unanswered = 0
            answer = msgspec.msgpack.decode(payload, type=JoinAnswer)
            if answer.refusal:
                _log.error(
                    "the router at %s does not take this host: %s", self._router, answer.refusal
                )
                return
            if not has_answered:
                has_answered = True
                _log.info("joined the router at %s", self._router)
            interval_s = answer.ttl_s / _BEATS_PER_TTL
            await asyncio.sleep(interval_s)
