# SPDX-License-Identifier: Apache-2.0
"""Hosts in addresses: names, IPv4 and IPv6, which has brackets in front of a port and nowhere else."""

from __future__ import annotations

import ipaddress
import socket

import zmq

_ANY_PORT = 9
"""The port to which a socket is connected to see its own address; nothing is sent there."""


def bracketed(host: str) -> str:
    """The host as it stands in front of a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_host(host: str) -> bool:
    """True for what may stand in front of a port: a name, an IPv4 address, or an IPv6 address in brackets."""
    if host.startswith("["):
        return host.endswith("]") and is_ipv6(host[1:-1])
    return bool(host) and not any(sign in host for sign in "[]:/@#, ")


def is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def family(host: str) -> socket.AddressFamily:
    """The family of a numeric address; IPv4 for a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def allow_ipv6(of: zmq.Socket[bytes], address: str) -> None:
    """Lets a ZeroMQ socket take an IPv6 address; where it may, it looks up no IPv4 addresses of names."""
    of.setsockopt(zmq.IPV6, int("[" in address))


def numeric(host: str) -> str:
    """The address of a host, an IPv6 one in brackets; IPv4 where a name has both. Raises OSError: it has none."""
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    best = min(found, key=lambda entry: entry[0] is not socket.AF_INET)
    return bracketed(str(best[4][0]))


def own_address(towards: str) -> str:
    """The address from which this machine reaches the host `towards`. Raises OSError: there is no way there."""
    family, kind, protocol, _, where = socket.getaddrinfo(
        towards.strip("[]"), _ANY_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return bracketed(str(probe.getsockname()[0]))
