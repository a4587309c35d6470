# SPDX-License-Identifier: Apache-2.0
"""The transports by their names."""

from __future__ import annotations

from collections.abc import Callable

from pagoda.kv.memory import DeviceMemory, OwnMemory
from pagoda.plugins.disaggregation.transport.base import Access, KVTransport
from pagoda.plugins.disaggregation.transport.mooncake import MooncakeTransport
from pagoda.plugins.disaggregation.transport.nixl import NixlTransport
from pagoda.plugins.disaggregation.transport.shm import ShmTransport
from pagoda.plugins.disaggregation.transport.tcp import TcpTransport

TRANSPORTS: dict[str, Callable[[OwnMemory | DeviceMemory, Access], KVTransport]] = {
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "nixl": NixlTransport,
    "mooncake": MooncakeTransport,
}
"""Transports by their name in `--kv-transports`. Making one raises TransportError if this host lacks what it
needs."""
