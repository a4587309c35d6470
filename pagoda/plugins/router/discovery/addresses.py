# SPDX-License-Identifier: Apache-2.0
"""Addresses of hosts, routers and etcd in flags."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.ipc.addresses import is_host, is_ipv6, own_address
from pagoda.ipc.tls import TlsFiles, client_context

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737): the way there is that to most others."""
_ETCD_SCHEME = "etcd://"
_ETCD_TLS_SCHEME = "etcds://"
_ETCD_FLAGS = ("--etcd-cert", "--etcd-key", "--etcd-cacert")


def parse_address(address: str, flag: str, *, fixed: bool = False) -> str:
    """`address`, a host and a port, as ZeroMQ takes it behind `tcp://`. Port 0 becomes any free one, or is
    refused where the port must be `fixed`.

    Raises ConfigError if `address` is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not is_port or not is_host(host) or (fixed and int(port) == 0):
        raise ConfigError(
            f"{flag} must be HOST:PORT, a name or an address and a port, such as 10.0.0.1:5600 or "
            f"[fd00::1]:5600, got {address!r}."
        )
    return f"{host}:{'*' if int(port) == 0 else int(port)}"


@dataclass(frozen=True)
class Advertised:
    host: str
    port: int | None
    """None takes a free one."""

    @classmethod
    def parse(cls, address: str | None, join: str | None = None) -> Advertised:
        """The meaning of `--advertise`. A host that it leaves open, as in `:5601`, is the address from which this
        machine reaches the router or etcd of `--join`, or else most others; None is the same, or else loopback.

        Raises ConfigError if `address` is neither HOST, HOST:PORT nor :PORT, or the machine's own is not known.
        """
        if address is None:
            return cls(LOOPBACK if join is None else _own_host(join), None)
        if is_ipv6(address):
            return cls(f"[{address}]", None)
        if is_host(address):
            return cls(address, None)
        whole = f"{LOOPBACK}{address}" if address.startswith(":") else address
        try:
            host, _, port = parse_address(whole, "--advertise", fixed=True).rpartition(":")
        except ConfigError:
            raise ConfigError(
                "--advertise must be HOST, HOST:PORT or :PORT, where HOST is a name or an address, such as "
                f"10.0.0.2, 10.0.0.2:5601 or [fd00::2]:5601, got {address!r}."
            ) from None
        return cls(_own_host(join) if address.startswith(":") else host, int(port))


def _own_host(join: str | None) -> str:
    """The address from which this machine reaches the first of the addresses in `--join`, or else most others."""
    first = (join or "").removeprefix(_ETCD_SCHEME).removeprefix(_ETCD_TLS_SCHEME)
    towards = first.partition("/")[0].partition(",")[0].rpartition(":")[0] or _ELSEWHERE
    try:
        return own_address(towards)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"--advertise must name an address of this machine: there is no way from here to {towards} ({reason})."
        ) from None


def etcd_files(certificate: Path | None, key: Path | None, authorities: Path | None) -> TlsFiles:
    """The files that etcdctl's flags of the same names take."""
    return TlsFiles(certificate, key, authorities, _ETCD_FLAGS)


NO_ETCD_FILES = etcd_files(None, None, None)


@dataclass(frozen=True)
class EtcdPlace:
    """A prefix in an etcd."""

    servers: tuple[str, ...]
    """Each `host:port`; any of them will do."""
    prefix: str
    tls: ssl.SSLContext | None = None
    """None speaks plain HTTP."""

    @classmethod
    def parse(cls, url: str, flag: str, files: TlsFiles = NO_ETCD_FILES) -> EtcdPlace:
        """Raises ConfigError if `url` is not the URL of a place in etcd, or if `files` cannot be used."""
        scheme, _, rest = url.partition("://")
        servers, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        if not is_etcd(url) or not prefix:
            raise ConfigError(
                f"{flag} must be etcd://HOST:PORT/PREFIX, such as etcd://10.0.0.1:2379/pagoda, "
                f"or etcds:// for TLS, got {url!r}."
            )
        addresses = (parse_address(server, flag, fixed=True) for server in servers.split(","))
        if f"{scheme}://" == _ETCD_TLS_SCHEME:
            return cls(tuple(addresses), prefix, client_context(files))
        if files.paths:
            raise ConfigError(f"{', '.join(files.flags)} need {flag} etcds://HOST:PORT/PREFIX.")
        return cls(tuple(addresses), prefix)


def is_etcd(url: str) -> bool:
    return url.startswith((_ETCD_SCHEME, _ETCD_TLS_SCHEME))
