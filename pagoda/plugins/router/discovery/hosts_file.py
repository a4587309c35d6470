# SPDX-License-Identifier: Apache-2.0
"""Hosts are listed in a file, one `HOST:PORT` a line, which is read again when it has changed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.files import open_regular
from pagoda.ipc.addresses import parse_address
from pagoda.plugins.router.discovery.base import Discovery, HostListener, HostTable, Notices
from pagoda.plugins.router.messages import HostRecord

_LOOK_S = 1.0
_MAX_BYTES = 2**20

_log = logging.getLogger(__name__)


class FileDiscovery(Discovery):
    """The router's side; hosts need not know of it. A file that is not right, or empty, changes nothing."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read or a line of it is wrong."""
        self._path = path
        self._notices = Notices(_log)
        self._stamp = _stamp(path)
        self._hosts = HostTable()
        self._set(read_hosts(path))

    async def follow(self, listener: HostListener) -> None:
        """Looks every second whether the file has changed."""
        self._hosts.listen(listener)
        while True:
            await asyncio.sleep(_LOOK_S)
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read_again()

    def _read_again(self) -> None:
        try:
            hosts = read_hosts(self._path)
            if not hosts and self._hosts.keys():
                raise ConfigError(f"--discovery {self._path} lists no host any more.")
        except ConfigError as error:
            self._notices.warn(f"{error} The hosts stay those that it had before.")
            return
        self._notices.inform(f"{self._path} lists {len(hosts)} hosts")
        self._set(hosts)

    def _set(self, hosts: dict[str, HostRecord]) -> None:
        for address in [*self._hosts.keys(), *hosts]:
            self._hosts.set(address, hosts.get(address))


def read_hosts(path: Path) -> dict[str, HostRecord]:
    """The hosts in a file, by address. Empty lines, and text after a `#`, do not count.

    Raises ConfigError if the file cannot be read, or a line, which the error names, is wrong or has no end.
    """
    try:
        with open(path, encoding="utf-8", opener=open_regular) as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--discovery {path} cannot be read ({reason}).") from None
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"--discovery {path} is longer than {_MAX_BYTES} characters.")
    if text and not text.endswith("\n"):
        raise ConfigError(
            f"--discovery {path} must end with a line break; without one the file may be incomplete."
        )
    hosts: dict[str, HostRecord] = {}
    for number, line in enumerate(text.splitlines(), 1):
        address = line.partition("#")[0].strip()
        if not address:
            continue
        place = f"--discovery {path}, line {number},"
        host = HostRecord(host_id="", address=f"tcp://{parse_address(address, place, fixed=True)}")
        if host.address in hosts:
            raise ConfigError(f"{place} names {address} a second time.")
        hosts[host.address] = host
    return hosts


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Differs when the file has changed, or another has its name."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
