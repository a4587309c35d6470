# SPDX-License-Identifier: Apache-2.0
"""Hosts as network namespaces of Linux, joined by a cable that delays, loses, and can be cut.

The two ends of the cable are TUN devices, and a thread of the test carries packets from one to the other. Not
every kernel has `tc netem`, which would do the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_TUN = Path("/dev/net/tun")
_NAMESPACES = Path("/run/netns")
_MAX_PACKET_BYTES = 65536


def missing_for_namespaces() -> str | None:
    """Why this machine cannot make network namespaces and TUN devices; None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    if not _TUN.exists():
        return f"there is no {_TUN}"
    name = f"pagoda{os.getpid()}x"
    try:
        with open(_TUN, "rb"):
            _ip("netns", "add", name)
            _ip("netns", "delete", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not permitted ({error})"
    return None


@dataclass(frozen=True)
class Host:
    """A network namespace with an address of its own."""

    namespace: str
    address: str

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this thread's new sockets and child processes belong to the host."""
        with open("/proc/thread-self/ns/net") as home, open(_NAMESPACES / self.namespace) as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


class Cable:
    """Carries IP packets between two TUN devices. What lies on it when it is cut arrives still."""

    def __init__(self, ends: tuple[int, int], *, delay_s: float, loss: float, seed: int) -> None:
        """`ends` are open TUN devices; each packet takes `delay_s`, and the share `loss` is lost."""
        self._ends = ends
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(seed)
        self._is_cut = False
        self._stop, self._stopped = os.pipe()
        self.num_lost = 0
        """By chance, or because the cable was cut."""
        self._thread = threading.Thread(target=self._carry, name="cable", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._is_cut = True

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        for fd in (*self._ends, self._stop):
            os.close(fd)

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        poll = select.poll()
        for fd in (*self._ends, self._stop):
            poll.register(fd, select.POLLIN)
        number = 0
        while True:
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, _, fd, packet = heapq.heappop(under_way)
                with contextlib.suppress(OSError):  # a device that is down loses it
                    os.write(fd, packet)
            timeout_ms = max(0.0, (under_way[0][0] - now) * 1000) if under_way else None
            for fd, _ in poll.poll(timeout_ms):
                if fd == self._stop:
                    return
                packet = os.read(fd, _MAX_PACKET_BYTES)
                if self._is_cut or self._random.random() < self._loss:
                    self.num_lost += 1
                    continue
                number += 1
                other = self._ends[fd == self._ends[0]]
                arrival = time.monotonic() + self._delay_s
                heapq.heappush(under_way, (arrival, number, other, packet))


@contextlib.contextmanager
def two_hosts(*, delay_s: float, loss: float, seed: int = 0) -> Iterator[tuple[Host, Host, Cable]]:
    """Two hosts that reach each other over one cable, and nobody else. Nothing of them is left behind."""
    prefix = f"pagoda{os.getpid()}"
    hosts = (Host(f"{prefix}a", "10.213.0.1"), Host(f"{prefix}b", "10.213.0.2"))
    with contextlib.ExitStack() as stack:
        ends = []
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
            with host.entered():
                ends.append(_open_tun("cable"))
                _ip("link", "set", "lo", "up")
                _ip("address", "add", f"{host.address}/24", "dev", "cable")
                _ip("link", "set", "cable", "up")
        cable = Cable((ends[0], ends[1]), delay_s=delay_s, loss=loss, seed=seed)
        stack.callback(cable.close)
        yield *hosts, cable


def _open_tun(name: str) -> int:
    fd = os.open(_TUN, os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
