# SPDX-License-Identifier: Apache-2.0
"""Discoveries and registrations for `--join`, `--discovery` and `--join-listen`.

The entry points of `pagoda.discoveries` are `DiscoveryPlugin` objects by the schemes of their URLs.
"""

from __future__ import annotations

from pathlib import Path

from pagoda.ipc.addresses import parse_address
from pagoda.ipc.tls import TlsFiles
from pagoda.messages.worker_config import CurveKeys
from pagoda.plugins.router.discovery.base import (
    Context,
    Discover,
    DiscoveryPlugin,
    Register,
    Registration,
)
from pagoda.plugins.router.discovery.etcd_place import NO_ETCD_FILES
from pagoda.plugins.router.discovery.hosts_file import FileDiscovery
from pagoda.plugins.router.discovery.joins import JoinDiscovery, Membership
from pagoda.plugins.router.messages import HostRecord
from pagoda.registry import load, registered

_GROUP = "pagoda.discoveries"


def registering(join: str | None, keys: CurveKeys, tls_files: TlsFiles = NO_ETCD_FILES) -> Register:
    """Registrations for `--join`; None registers nowhere, for routers that read a file of hosts.

    Raises ConfigError if `join` is neither a list of HOST:PORT nor a URL of a discovery, or if
    `tls_files` cannot be used.
    """
    if join is None:
        return lambda _context, _host: []
    plugin = _plugin_for(join)
    if plugin is not None:
        return plugin.register(join, "--join", tls_files)
    routers = [parse_address(router, "--join", fixed=True) for router in join.split(",")]

    def register(context: Context, host: HostRecord) -> list[Registration]:
        return [Membership(context, router, keys, host) for router in routers]

    return register


def discovering(
    discovery: str | None, join_listen: str, keys: CurveKeys, tls_files: TlsFiles = NO_ETCD_FILES
) -> Discover:
    """Discovery for `--discovery`; None lets hosts join at `join_listen`.

    Raises ConfigError if a value is malformed, or if `tls_files` cannot be used.
    """
    if discovery is None:
        listen = parse_address(join_listen, "--join-listen")
        return lambda context: JoinDiscovery(context, listen, keys)
    plugin = _plugin_for(discovery)
    if plugin is not None:
        return plugin.discover(discovery, "--discovery", tls_files)
    path = Path(discovery)
    return lambda _context: FileDiscovery(path)


def _plugin_for(url: str) -> DiscoveryPlugin | None:
    """The discovery of a URL; None for what has the scheme of none.
    Raises ConfigError: it cannot be imported, or there are two."""
    scheme, separator, _ = url.partition("://")
    known = bool(separator) and scheme in registered(_GROUP)
    return load(_GROUP, scheme, DiscoveryPlugin) if known else None
