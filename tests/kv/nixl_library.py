# SPDX-License-Identifier: Apache-2.0
"""NIXL as far as transports use it, in one process: it moves only what was registered as what it is called.

Memory of every kind is host memory here, and what an agent says of its own is what it has registered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec


class NixlError(Exception):
    """What the library raises."""


class Registered(NamedTuple):
    kind: str
    device: int
    address: int
    num_bytes: int

    def holds(self, kind: str, address: int, num_bytes: int, device: int) -> bool:
        first, end = self.address, self.address + self.num_bytes
        return (self.kind, self.device) == (kind, device) and first <= address <= end - num_bytes


class Descriptors(NamedTuple):
    kind: str
    pieces: list[tuple[int, int, int]]
    """Address, bytes and device of each."""

    def check(self, registered: Collection[Registered]) -> None:
        for piece in self.pieces:
            if not any(one.holds(self.kind, *piece) for one in registered):
                raise NixlError(f"NIXL_ERR_NOT_FOUND: {piece} is not registered as {self.kind}")


class _Metadata(msgspec.Struct):
    name: str
    registered: list[Registered]


class Transfer:
    def __init__(self, here: Descriptors, there: Descriptors) -> None:
        self.here, self.there = here, there
        self.is_released = False

    def release(self) -> None:
        self.is_released = True


class Agent:
    def __init__(self, library: Library, name: str) -> None:
        self._library, self._name = library, name
        self.registered: list[Registered] = []
        self._peers: dict[str, list[Registered]] = {}

    def register_memory(self, regions: Sequence[tuple[int, int, int, str]], kind: str) -> None:
        if kind not in self._library.kinds:
            raise NixlError("NIXL_ERR_BACKEND")
        self.registered += [Registered(kind, device, at, size) for at, size, device, _ in regions]

    def get_agent_metadata(self) -> bytes:
        return msgspec.msgpack.encode(_Metadata(self._name, self.registered))

    def add_remote_agent(self, metadata: bytes) -> str:
        peer = msgspec.msgpack.decode(metadata, type=_Metadata)
        self._peers[peer.name] = peer.registered
        return peer.name

    def make_connection(self, peer: str) -> None:
        if peer not in self._peers:
            raise NixlError("NIXL_ERR_NOT_FOUND")

    def get_xfer_descs(self, pieces: Sequence[tuple[int, int, int]], kind: str) -> Descriptors:
        return Descriptors(kind, list(pieces))

    def initialize_xfer(
        self, operation: str, here: Descriptors, there: Descriptors, peer: str
    ) -> Transfer:
        if operation != "READ" or len(here.pieces) != len(there.pieces):
            raise NixlError("NIXL_ERR_INVALID_PARAM")
        here.check(self.registered)
        there.check(self._peers[peer])
        return Transfer(here, there)

    def send_notif(self, peer: str, message: bytes) -> None:
        del message
        self.make_connection(peer)

    def transfer(self, handle: Transfer) -> str:
        if handle.is_released:
            raise NixlError("NIXL_ERR_INVALID_PARAM")
        self._library.before_transfer()
        pairs = zip(handle.here.pieces, handle.there.pieces, strict=True)
        for (target, num_bytes, _), (source, as_many, _) in pairs:
            if num_bytes != as_many:
                raise NixlError("NIXL_ERR_INVALID_PARAM")
            ctypes.memmove(target, source, num_bytes)
        self._library.transfers.append(handle)
        return "DONE"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


class Library:
    """The module `nixl._api`, whose UCX was built for memory of some kinds."""

    def __init__(self, kinds: Collection[str] = ("DRAM", "VRAM")) -> None:
        self.kinds = kinds
        self.transfers: list[Transfer] = []
        """Those that have moved something, the oldest first."""
        self.before_transfer: Callable[[], None] = lambda: None

    def nixl_agent_config(self, **options: Any) -> Any:
        return options

    def nixl_agent(self, name: str, config: Any) -> Agent:
        if config["backends"] != ["UCX"]:
            raise NixlError("NIXL_ERR_NOT_SUPPORTED")
        return Agent(self, name)
