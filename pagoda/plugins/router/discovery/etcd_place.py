# SPDX-License-Identifier: Apache-2.0
"""Places in an etcd, in flags."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.ipc.addresses import parse_address
from pagoda.ipc.tls import TlsFiles, client_context

_ETCD_SCHEME = "etcd://"
_ETCD_TLS_SCHEME = "etcds://"
_ETCD_FLAGS = ("--etcd-cert", "--etcd-key", "--etcd-cacert")


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
        if not url.startswith((_ETCD_SCHEME, _ETCD_TLS_SCHEME)) or not prefix:
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
