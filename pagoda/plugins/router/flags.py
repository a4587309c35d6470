# SPDX-License-Identifier: Apache-2.0
"""Flags of servers that are hosts of routers, and of routers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from pagoda.cli.cluster import ROUTERS, ServerStart
from pagoda.fleet.fleet import Entrance
from pagoda.ipc.tls import TlsFiles
from pagoda.plugins.router.discovery.etcd_place import etcd_files


@Parameter(name="*", group=ROUTERS)
@dataclass(frozen=True, kw_only=True)
class JoinFlags:
    """Routers that this server works for, besides its own API."""

    join: Annotated[str | None, Parameter(metavar="HOST:PORT,...|etcd[s]://HOST:PORT/PREFIX")] = (
        None
    )
    """Routers (pagoda route) that may send requests here, or an etcd in which they look for hosts."""
    pool: Annotated[str, Parameter(show_default=False)] = ""
    """The pool of these routers to work in, where several have this model; by default the one of the model's name
    here, or else the first of them."""
    region: Annotated[str, Parameter(show_default=False)] = ""
    """The place of this server, which routers may weigh (--pools) and show."""
    price: Annotated[float, Parameter(validator=Number(gte=0, lte=1e9))] = 0.0
    """Cost of this server beside others, in any unit that is the same for all, for routers that weigh it."""
    etcd_cacert: Path | None = None
    """A PEM file of the authorities by which an etcd at etcds://... is known, instead of those of this machine."""
    etcd_cert: Path | None = None
    """A PEM file with the certificate to show to etcd (mutual TLS)."""
    etcd_key: Path | None = None
    """The PEM file of its key, if that is not in the same file."""

    @property
    def etcd_files(self) -> TlsFiles:
        return etcd_files(self.etcd_cert, self.etcd_key, self.etcd_cacert)

    def opened(self) -> AbstractContextManager[object]:
        return nullcontext()

    def entrance(self, server: ServerStart) -> Entrance | None:
        """None if no router is served. Raises ConfigError: a flag lacks another or has an impossible value."""
        if self.join is None and server.cluster.port is None:
            return None
        from pagoda.plugins.router.door import (
            entrance,  # sockets, which other servers need not have
        )

        return entrance(server, self)
