# SPDX-License-Identifier: Apache-2.0
"""Connections between all ranks of a group whose devices are emulated, beside those that their hosts talk over.

What a GPU exchanges with others goes on while its host does something else, or waits for other ranks itself. So
whoever gives a part lets each rank do the work that leads to its own, as if it waited there.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TypeVar

import torch

from pagoda.parallel.collectives import HostGroup

T = TypeVar("T")
_LENGTH_BYTES = 8
_ADDRESS_BYTES = 64
"""Most bytes of an address and a port in text."""

_Queue = SimpleQueue[T | None]
"""None is the end."""
WorkUntil = Callable[[Callable[[], bool]], None]
"""Does a device's work until something is true; waits for work that is submitted later."""


class Mesh:
    """One rank's connections, and the threads that listen to them."""

    def __init__(self, group: HostGroup, work_until: WorkUntil) -> None:
        """Connects the ranks of `group`, each of which does this at the same time. `work_until` lets this one's
        device work, in another thread."""
        self._rank = group.rank
        self._work_until = work_until
        self._num_given = 0
        self._links = _connect(group)
        self._parts: dict[int, _Queue[bytes]] = {rank: SimpleQueue() for rank in self._links}
        asked: _Queue[int] = SimpleQueue()
        for rank, link in self._links.items():
            _start(_receive, link, self._parts[rank], asked)
        links = list(self._links.values())
        _start(_give_what_is_asked, weakref.ref(self), links, asked)
        weakref.finalize(self, _hang_up, links)
        weakref.finalize(self, asked.put, None)

    def all_give(self, own: bytes) -> list[bytes]:
        """The bytes that each rank gives, in order of rank.

        Raises ConnectionError: one has gone, or its device has failed.
        """
        for link in self._links.values():
            link.sendall(len(own).to_bytes(_LENGTH_BYTES, "little") + own)
        found = {self._rank: own} | {peer: self._taken(peer) for peer in self._links}
        self._num_given += 1
        return [found[each] for each in sorted(found)]

    def _taken(self, peer: int) -> bytes:
        part = self._parts[peer].get()
        if part is None:
            raise ConnectionError(f"Rank {peer} of the group is gone, or its device has failed.")
        return part

    def give_behind(self, number: int) -> None:
        """Lets the device work until this rank has given its part of that number, counted from 0."""
        self._work_until(lambda: self._num_given > number)


def _connect(group: HostGroup) -> Mapping[int, socket.socket]:
    """Links to the other ranks, by rank: each calls those before it."""
    family = socket.AF_INET6 if ":" in group.host else socket.AF_INET
    with socket.create_server((group.host, 0), family=family, backlog=group.size) as listener:
        address = f"{group.host} {listener.getsockname()[1]}".encode().ljust(_ADDRESS_BYTES)
        addresses = group.all_gather(torch.tensor(list(address), dtype=torch.uint8))
        links = {}
        for rank in range(group.rank):
            host, port = bytes(addresses[rank].tolist()).decode().split()
            links[rank] = socket.create_connection((host, int(port)))
            links[rank].sendall(bytes([group.rank]))
        for _ in range(group.rank + 1, group.size):
            link, _address = listener.accept()
            links[link.recv(1)[0]] = link
    return links


def _start(target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()


def _receive(link: socket.socket, parts: _Queue[bytes], asked: _Queue[int]) -> None:
    """Takes what a peer gives, and asks for this rank's part of the same number, until one of them is gone."""
    with contextlib.suppress(OSError), link.makefile("rb") as stream:
        for number in itertools.count():
            length = stream.read(_LENGTH_BYTES)
            if len(length) < _LENGTH_BYTES:
                break
            part = stream.read(num_bytes := int.from_bytes(length, "little"))
            if len(part) < num_bytes:
                break
            parts.put(part)
            asked.put(number)
    parts.put(None)


def _give_what_is_asked(
    mesh: weakref.ref[Mesh], links: Sequence[socket.socket], asked: _Queue[int]
) -> None:
    # A device that has failed tells its own host when that waits for it, and peers by the end of their links.
    with contextlib.suppress(Exception):
        while (number := asked.get()) is not None:
            own = mesh()
            if own is None:
                break
            own.give_behind(number)
            del own
    _hang_up(links)


def _hang_up(links: Sequence[socket.socket]) -> None:
    for link in links:
        with contextlib.suppress(OSError):  # the peer was first
            link.shutdown(socket.SHUT_RDWR)
