# SPDX-License-Identifier: Apache-2.0
"""The transports by their names."""

from __future__ import annotations

from collections.abc import Callable

from pagoda.kv.memory import DeviceMemory, OwnMemory
from pagoda.pd.transport.base import Access, Transport
from pagoda.pd.transport.mooncake import MooncakeTransport
from pagoda.pd.transport.nixl import NixlTransport
from pagoda.pd.transport.shm import ShmTransport
from pagoda.pd.transport.tcp import TcpTransport

TRANSPORTS: dict[str, Callable[[OwnMemory | DeviceMemory, Access], Transport]] = {
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "nixl": NixlTransport,
    "mooncake": MooncakeTransport,
}
"""Transports by their name in `--kv-transports`. Making one raises TransportError if this host lacks what it
needs."""
