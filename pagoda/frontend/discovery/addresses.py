"""Addresses of hosts, routers and etcd in flags."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.ipc.tls import TlsFiles, client_context

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
    if not is_port or not _is_host(host) or (fixed and int(port) == 0):
        raise ConfigError(
            f"{flag} must be HOST:PORT, a name or an IPv4 address and a port, such as 10.0.0.1:5600, "
            f"got {address!r}."
        )
    return f"{host}:{'*' if int(port) == 0 else int(port)}"


@dataclass(frozen=True)
class Advertised:
    host: str
    port: int | None
    """None takes a free one."""

    @classmethod
    def parse(cls, address: str) -> Advertised:
        """Raises ConfigError if `address` is neither HOST nor HOST:PORT."""
        if address.count(":") == 1:
            host, _, port = parse_address(address, "--advertise", fixed=True).rpartition(":")
            return cls(host, int(port))
        if not _is_host(address):
            raise ConfigError(
                "--advertise must be HOST or HOST:PORT, a name or an IPv4 address, such as 10.0.0.2 or "
                f"10.0.0.2:5601, got {address!r}."
            )
        return cls(address, None)


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


def _is_host(host: str) -> bool:
    return bool(host) and not any(sign in host for sign in ":/@#, ")
