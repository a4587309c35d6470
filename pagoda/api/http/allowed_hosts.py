# SPDX-License-Identifier: Apache-2.0
"""Names in Host headers: a web page whose name was made to point here (DNS rebinding) has another one."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
"""A name or an address with a port, as in RFC 9110, 7.2; anything else is not a header of a browser."""


@dataclass(frozen=True)
class AllowedHosts:
    """The Host headers that a server accepts."""

    names: frozenset[str] | None = None
    """Names and addresses in lower case; None accepts all."""
    any_address: bool = False
    """Accepts every IP address besides: no name was made to point here, then."""

    def allows(self, host: str) -> bool:
        """True if the header is well-formed and names this server."""
        parts = _HOST.fullmatch(host)
        if parts is None:
            return False
        name = (parts["address"] or parts["name"]).lower()
        if self.names is None or name in self.names:
            return True
        return self.any_address and _is_address(name)


ANY_HOST = AllowedHosts()
_LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


def hosts_for(bind_host: str, extra: Sequence[str] = ()) -> AllowedHosts:
    """The hosts for a server that listens at `bind_host`: local names and `extra` if only this machine reaches it.
    Others reach it by names that only its operator knows: all are accepted unless there are `extra` ones.
    """
    name = bind_host.strip("[]").lower()
    names = _LOCAL_NAMES | {name} | {host.lower() for host in extra}
    if _is_local(name):
        return AllowedHosts(names)
    return AllowedHosts(names, any_address=True) if extra else ANY_HOST


def _is_local(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
