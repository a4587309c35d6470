# SPDX-License-Identifier: Apache-2.0
"""Flags of servers that work together with others, and the seam for plugins that bring these together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

from cyclopts import Group, Parameter

from pagoda.checkpoints.resolve import ModelFiles
from pagoda.errors import ConfigError
from pagoda.fleet.fleet import Entrance
from pagoda.ipc.addresses import Advertised
from pagoda.ipc.curve import read_cluster_key
from pagoda.messages.frontend import PoolModel
from pagoda.messages.worker_config import CurveKeys
from pagoda.telemetry.request_spans import RequestSpans

ROUTERS = Group("Routers above", sort_key=25)


@Parameter(name="*", group=ROUTERS)
@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """This server among others."""

    cluster_key_file: Path | None = None
    """A file with the secret that hosts and routers share."""
    advertise: Annotated[str | None, Parameter(metavar="[HOST][:PORT]")] = None
    """The address of this machine at which routers reach it; without a port a free one is taken, without a host
    the address from which it reaches the router or etcd of --join."""

    @property
    def port(self) -> int | None:
        """The port of --advertise. Raises ConfigError for a bad --advertise."""
        return Advertised.parse(self.advertise).port

    def keys(self, user: str) -> CurveKeys:
        """Raises ConfigError if --cluster-key-file, which `user` needs, is missing or holds no secret."""
        if self.cluster_key_file is None:
            raise ConfigError(
                f"{user} needs --cluster-key-file, a file with the secret that hosts and routers share."
            )
        return read_cluster_key(self.cluster_key_file)


@dataclass(frozen=True)
class ServerStart:
    """A server that is about to start."""

    files: ModelFiles
    cluster: ClusterOptions
    spans: RequestSpans | None
    """Spans that are made of answers."""
    name: str
    """Name of the model in the API."""
    models: tuple[PoolModel, ...] = ()
    """The models of a server of several, by their names here; empty if it has one."""


@runtime_checkable
class HostFlags(Protocol):
    """Flags of a plugin by which a server is a host of others."""

    @property
    def join(self) -> str | None:
        """URL or addresses of those that are to know this server; None if the flags name none."""

    def entrance(self, server: ServerStart) -> Entrance | None:
        """The way by which others ask this server; None if the flags ask for none.
        Raises ConfigError: a flag lacks another or has an impossible value."""
