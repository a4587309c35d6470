"""KV over NIXL (`pagoda-llm[nixl]`): by UCX over whatever network there is, InfiniBand among them.

NIXL does not know the cluster's secret: any process with a descriptor can read. Descriptors go from engine to
engine over authenticated, encrypted connections; the network below must be trusted.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pagoda.pd.transport.base import Access, DeviceMemory, OwnMemory, Region, TransportError
from pagoda.pd.transport.remote_memory import (
    BatchedLink,
    Piece,
    check_time,
    load_library,
    read_descriptor,
)

_PAUSE_S = 50e-6
"""Seconds between two polls: NIXL has no notification to wait for."""
_IDLE_PAUSE_S = 2e-3
_AWAKE_S = 1.0
"""Seconds for which an exporter polls often after a reader has announced a read."""
_SETTLE_TURNS = 20
_SETTLE_PAUSE_S = 1e-3
_FAREWELL_S = 3.0
"""Seconds that closing waits for a read under way."""


class NixlDescriptor(msgspec.Struct, frozen=True):
    metadata: bytes
    regions: list[Region]


class NixlTransport:
    def __init__(self, memory: OwnMemory | DeviceMemory, access: Access) -> None:
        """Raises TransportError if NIXL is not installed or does not work here."""
        if isinstance(memory, DeviceMemory):
            raise TransportError(
                "the KV cache lies on a device, and NIXL is given host memory only"
            )
        if access.encrypts:
            raise TransportError("NIXL does not encrypt")
        self._memory = memory
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        self._nixl = load_library("nixl._api", "NIXL", "pip install 'pagoda-llm[nixl]'")
        self._abandoned: list[Any] = []
        """Agents with reads that have not ended: UCX ends the process when they are taken down."""

    def export(self) -> NixlListener:
        return NixlListener(self._nixl, self._memory.regions)

    def connect(self, descriptor: bytes, deadline: float) -> NixlLink:
        regions = self._memory.regions
        return NixlLink(self._nixl, regions, descriptor, deadline, self._abandoned)


class NixlListener:
    """An agent of its own, whose end is the end of all reads.

    NIXL's own thread would never sleep; ours looks often only while somebody reads, who says so before.
    """

    def __init__(self, nixl: Any, regions: Sequence[Region]) -> None:
        agent = _new_agent(nixl, regions)
        self.descriptor = msgspec.msgpack.encode(
            NixlDescriptor(agent.get_agent_metadata(), list(regions))
        )
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._answer, args=(agent,), name="kv-nixl-export", daemon=True
        )
        self._thread.start()

    def _answer(self, agent: Any) -> None:
        awake_until = 0.0
        while not self._is_closed:
            if agent.get_new_notifs():
                awake_until = time.monotonic() + _AWAKE_S
            time.sleep(_PAUSE_S if time.monotonic() < awake_until else _IDLE_PAUSE_S)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(_FAREWELL_S)


class NixlLink(BatchedLink):
    """An agent of its own, without a thread: what comes for it is only written while somebody reads."""

    most_bytes = 2**26
    most_spans = 2**14

    def __init__(
        self,
        nixl: Any,
        regions: Sequence[Region],
        descriptor: bytes,
        deadline: float,
        abandoned: list[Any],
    ) -> None:
        """`regions` are read into; `abandoned` keeps the agent when a read has failed."""
        remote = read_descriptor(descriptor, NixlDescriptor)
        super().__init__(remote.regions)
        self._abandoned = abandoned
        self.agent: Any = _new_agent(nixl, regions)
        try:
            self._peer = self.agent.add_remote_agent(remote.metadata)
            self.agent.make_connection(self._peer)
        except Exception as error:
            self.agent = None
            raise TransportError(f"NIXL does not reach it: {_told(error)}") from error
        try:
            check_time(deadline)
        except TransportError:
            self.close()
            raise

    def _read(self, pieces: list[Piece], deadline: float) -> None:
        agent = self.agent
        try:
            here = agent.get_xfer_descs([(p.target, p.num_bytes, 0) for p in pieces], "DRAM")
            there = agent.get_xfer_descs([(p.source, p.num_bytes, 0) for p in pieces], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, self._peer)
            agent.send_notif(self._peer, b"reads")
            state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() <= self.shortened(deadline, _FAREWELL_S):
                time.sleep(_PAUSE_S)
                state = agent.check_xfer_state(handle)
            if state == "DONE":
                handle.release()
                return
        except Exception as error:
            raise TransportError(f"NIXL: {_told(error)}") from error
        raise TransportError("it took too long" if state == "PROC" else "NIXL could not read it")

    def _release(self) -> None:
        agent, self.agent = self.agent, None
        if self.has_failed:
            self._abandoned.append(agent)
        elif agent is not None:
            _settle(agent)


def _new_agent(nixl: Any, regions: Sequence[Region]) -> Any:
    try:
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = nixl.nixl_agent(secrets.token_hex(16), config)
        agent.register_memory([(r.address, r.num_bytes, 0, "") for r in regions], "DRAM")
    except Exception as error:
        raise TransportError(f"NIXL does not work here: {_told(error)}") from error
    return agent


def _settle(agent: Any) -> None:
    """Gets rid of what it still wants to say: UCX ends the process when that is taken down with it."""
    for _ in range(_SETTLE_TURNS):
        agent.get_new_notifs()
        time.sleep(_SETTLE_PAUSE_S)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
