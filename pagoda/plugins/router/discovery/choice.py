# SPDX-License-Identifier: Apache-2.0
"""Discoveries and registrations for `--join`, `--discovery` and `--join-listen`."""

from __future__ import annotations

from pathlib import Path

from pagoda.ipc.addresses import parse_address
from pagoda.ipc.tls import TlsFiles
from pagoda.messages.worker_config import CurveKeys
from pagoda.plugins.router.discovery.base import Context, Discover, Register, Registration
from pagoda.plugins.router.discovery.etcd import EtcdDiscovery, EtcdRegistration
from pagoda.plugins.router.discovery.etcd_place import NO_ETCD_FILES, EtcdPlace, is_etcd
from pagoda.plugins.router.discovery.hosts_file import FileDiscovery
from pagoda.plugins.router.discovery.joins import JoinDiscovery, Membership
from pagoda.plugins.router.messages import HostRecord


def registering(
    join: str | None, keys: CurveKeys, etcd_files: TlsFiles = NO_ETCD_FILES
) -> Register:
    """Registrations for `--join`; None registers nowhere, for routers that read a file of hosts.

    Raises ConfigError if `join` is neither a list of HOST:PORT nor a place in etcd, or if
    `etcd_files` cannot be used.
    """
    if join is None:
        return lambda _context, _host: []
    if is_etcd(join):
        place = EtcdPlace.parse(join, "--join", etcd_files)
        return lambda _context, host: [EtcdRegistration(place, host)]
    routers = [parse_address(router, "--join", fixed=True) for router in join.split(",")]

    def register(context: Context, host: HostRecord) -> list[Registration]:
        return [Membership(context, router, keys, host) for router in routers]

    return register


def discovering(
    discovery: str | None, join_listen: str, keys: CurveKeys, etcd_files: TlsFiles = NO_ETCD_FILES
) -> Discover:
    """Discovery for `--discovery`; None lets hosts join at `join_listen`.

    Raises ConfigError if a value is malformed, or if `etcd_files` cannot be used.
    """
    if discovery is None:
        listen = parse_address(join_listen, "--join-listen")
        return lambda context: JoinDiscovery(context, listen, keys)
    if is_etcd(discovery):
        place = EtcdPlace.parse(discovery, "--discovery", etcd_files)
        return lambda _context: EtcdDiscovery(place)
    path = Path(discovery)
    return lambda _context: FileDiscovery(path)
