# SPDX-License-Identifier: Apache-2.0
"""KV over NIXL (`pagoda-llm[nixl]`): by UCX over whatever network there is, InfiniBand among them.

Memory of a device that networks reach is read and written where it lies (GPUDirect); the two sides may have memory
of different kinds. NIXL knows nothing of streams: whoever announces blocks, or reads into some, has awaited the
device.

NIXL does not know the cluster's secret: any process with a descriptor can read. Descriptors go from engine to
engine over authenticated, encrypted connections; the network below must be trusted.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from typing import Annotated, Any

import msgspec

from pagoda.errors import TransportError
from pagoda.kv.memory import DeviceMemory, DirectMemory, MemoryKind, OwnMemory, Region
from pagoda.plugins.disaggregation.transport.base import Access
from pagoda.plugins.disaggregation.transport.remote_memory import (
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
    kind: MemoryKind = "DRAM"
    device: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of the device among those that the exporter sees."""


class NixlTransport:
    def __init__(self, memory: OwnMemory | DeviceMemory, access: Access) -> None:
        """Raises TransportError if NIXL is not installed, does not work here, or does not reach the memory."""
        if access.encrypts:
            raise TransportError("NIXL does not encrypt")
        self._memory = _direct(memory)
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        self._nixl = load_library("nixl._api", "NIXL", "pip install 'pagoda-llm[nixl]'")
        self._abandoned: list[Any] = []
        """Agents with reads that have not ended: UCX ends the process when they are taken down."""
        if isinstance(memory, DeviceMemory):
            # Only now UCX says whether it was built for the device; who only reads would else find out each time.
            _new_agent(self._nixl, self._memory)

    def export(self) -> NixlListener:
        return NixlListener(self._nixl, self._memory)

    def connect(self, descriptor: bytes, deadline: float) -> NixlLink:
        return NixlLink(self._nixl, self._memory, descriptor, deadline, self._abandoned)


def _direct(memory: OwnMemory | DeviceMemory) -> DirectMemory:
    if isinstance(memory, OwnMemory):
        return DirectMemory(memory.regions, "DRAM", 0, lambda: None)
    if memory.direct is None:
        raise TransportError("the KV cache lies on a device whose memory networks do not reach")
    return memory.direct()


class NixlListener:
    """An agent of its own, whose end is the end of all reads.

    NIXL's own thread would never sleep; ours looks often only while somebody reads, who says so before.
    """

    def __init__(self, nixl: Any, memory: DirectMemory) -> None:
        regions, kind, device, self._enter = memory
        agent = _new_agent(nixl, memory)
        self.descriptor = msgspec.msgpack.encode(
            NixlDescriptor(agent.get_agent_metadata(), list(regions), kind, device)
        )
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._answer, args=(agent,), name="kv-nixl-export", daemon=True
        )
        self._thread.start()

    def _answer(self, agent: Any) -> None:
        self._enter()
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
        memory: DirectMemory,
        descriptor: bytes,
        deadline: float,
        abandoned: list[Any],
    ) -> None:
        """`memory` is read into; `abandoned` keeps the agent when a read has failed."""
        remote = read_descriptor(descriptor, NixlDescriptor)
        super().__init__(remote.regions)
        self._memory, self._remote = memory, remote
        self.own_regions = memory.regions
        self._abandoned = abandoned
        self.agent: Any = _new_agent(nixl, memory)
        try:
            self._peer = self.agent.add_remote_agent(remote.metadata)
            self.agent.make_connection(self._peer)
            # Memory that is not what it is said to be is found out now, while there may be another transport.
            for one, other in zip(remote.regions[:1], memory.regions, strict=False):
                self._prepare([Piece(one.address, other.address, 1)]).release()
        except Exception as error:
            self.close()
            raise TransportError(f"NIXL does not reach it: {_told(error)}") from error
        try:
            check_time(deadline)
        except TransportError:
            self.close()
            raise

    def _read(self, pieces: list[Piece], deadline: float) -> None:
        agent = self.agent
        try:
            self._memory.enter()
            handle = self._prepare(pieces)
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

    def _prepare(self, pieces: list[Piece]) -> Any:
        """A read that can begin. Raises what NIXL raises: pieces are not in memory of that kind and device."""
        own, remote = self._memory, self._remote
        targets = [(piece.target, piece.num_bytes, own.device) for piece in pieces]
        sources = [(piece.source, piece.num_bytes, remote.device) for piece in pieces]
        here = self.agent.get_xfer_descs(targets, own.kind)
        there = self.agent.get_xfer_descs(sources, remote.kind)
        return self.agent.initialize_xfer("READ", here, there, self._peer)

    def _release(self) -> None:
        agent, self.agent = self.agent, None
        if self.has_failed:
            self._abandoned.append(agent)
        elif agent is not None:
            _settle(agent)


def _new_agent(nixl: Any, memory: DirectMemory) -> Any:
    """An agent that may read and write memory. It is used by threads that have entered its device."""
    regions = [(*region, memory.device, "") for region in memory.regions]
    problem = "NIXL does not work here"
    try:
        memory.enter()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = nixl.nixl_agent(secrets.token_hex(16), config)
        if memory.kind != "DRAM":
            problem = "NIXL does not take memory of the device, for which its UCX has to be built"
        agent.register_memory(regions, memory.kind)
    except Exception as error:
        raise TransportError(f"{problem}: {_told(error)}") from error
    return agent


def _settle(agent: Any) -> None:
    """Gets rid of what it still wants to say: UCX ends the process when that is taken down with it."""
    for _ in range(_SETTLE_TURNS):
        agent.get_new_notifs()
        time.sleep(_SETTLE_PAUSE_S)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
