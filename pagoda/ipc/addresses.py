# SPDX-License-Identifier: Apache-2.0
"""Hosts in addresses: names, IPv4 and IPv6, which has brackets in front of a port and nowhere else."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import zmq

from pagoda.errors import ConfigError

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737): the way there is that to most others."""
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
    """The address from which this machine reaches the host `towards`, IPv6 in brackets: the first, over all
    addresses of `towards`, at which that could reach this machine. Raises OSError: there is none."""
    found = socket.getaddrinfo(towards.strip("[]"), _ANY_PORT, type=socket.SOCK_DGRAM)
    refusal = OSError("it has no address")
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                own = str(probe.getsockname()[0])
            check_reachable(own, str(where[0]))
        except OSError as error:
            refusal = error
        else:
            return bracketed(own)
    raise refusal


def check_reachable(own: str, peer: str) -> None:
    """Raises OSError: a peer at the address `peer` does not reach this machine at `own`, its address towards the
    peer, because that is loopback or has no meaning beyond one link."""
    address, other = ipaddress.ip_address(own), ipaddress.ip_address(peer)
    is_here = other.is_loopback or other.is_unspecified or other == address
    if address.is_link_local or address.is_unspecified:
        raise OSError(f"the address towards it, {own}, counts on one link only")
    if address.is_loopback and not is_here:
        raise OSError(f"the address towards it, {own}, is this machine's alone")


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
    """The address of this machine at which others reach it."""

    host: str
    port: int | None
    """None takes a free one."""

    @classmethod
    def parse(cls, address: str | None, peer: str | None = None) -> Advertised:
        """The meaning of `--advertise`. A host that it leaves open, as in `:5601`, is the address from which this
        machine reaches `peer`, `[SCHEME://]HOST:PORT,...`, or else most others; None is the same, or loopback.

        Raises ConfigError if `address` is neither HOST, HOST:PORT nor :PORT, or the machine's own is not known.
        """
        if address is None:
            return cls(LOOPBACK if peer is None else _own_host(peer), None)
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
        return cls(_own_host(peer) if address.startswith(":") else host, int(port))


def _own_host(peer: str | None) -> str:
    """The address from which this machine reaches the first of the addresses of a peer, or else most others."""
    first = (peer or "").rpartition("://")[2]
    towards = first.partition("/")[0].partition(",")[0].rpartition(":")[0] or _ELSEWHERE
    try:
        return own_address(towards)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"--advertise must name an address of this machine: there is no way from here to {towards} ({reason})."
        ) from None
