# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagoda.errors import ConfigError
from pagoda.ipc.addresses import (
    Advertised,
    bracketed,
    check_reachable,
    is_host,
    numeric,
    own_address,
    parse_address,
)

Address = IPv4Address | IPv6Address


def test_ipv6_has_brackets_in_front_of_a_port() -> None:
    assert [bracketed(host) for host in ("::1", "[::1]", "10.0.0.1", "host")] == [
        *("[::1]", "[::1]", "10.0.0.1", "host")
    ]
    assert parse_address("[fd00::1]:5600", "--join", fixed=True) == "[fd00::1]:5600"
    assert parse_address("[::1]:0", "--join-listen") == "[::1]:*"
    assert numeric("::1") == numeric("[::1]") == "[::1]"
    assert numeric("127.0.0.1") == "127.0.0.1"
    assert all(map(is_host, ("a", "a.b-c", "10.0.0.1", "[::1]", "[fe80::1%eth0]")))
    assert not any(map(is_host, ("", "a:b", "::1", "[::1", "[a]", "[]", "a/b", "a b", "a,b")))


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.2", "10.0.0.2", None),
        ("10.0.0.2:5601", "10.0.0.2", 5601),
        ("prefill-0.pods", "prefill-0.pods", None),
        ("::1", "[::1]", None),
        ("[::1]", "[::1]", None),
        ("[fd00::2]:5601", "[fd00::2]", 5601),
        (None, "127.0.0.1", None),
    ],
)
def test_what_a_host_advertises(address: str | None, host: str, port: int | None) -> None:
    assert Advertised.parse(address) == Advertised(host, port)


@pytest.mark.parametrize(
    ("join", "host"),
    [
        ("127.0.0.1:5600", "127.0.0.1"),
        ("127.0.0.1:5600,10.0.0.9:5600", "127.0.0.1"),
        ("[::1]:5600", "[::1]"),
        ("localhost:5600", numeric("localhost")),
        ("etcd://127.0.0.1:2379,10.0.0.9:2379/pagoda", "127.0.0.1"),
        ("etcds://[::1]:2379/pagoda", "[::1]"),
    ],
)
def test_a_host_finds_its_own_address(join: str, host: str) -> None:
    assert Advertised.parse(None, join) == Advertised(host, None)
    assert Advertised.parse(":5601", join) == Advertised(host, 5601)
    assert Advertised.parse("10.0.0.2", join) == Advertised("10.0.0.2", None)


def test_a_machine_without_a_way_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        ConfigError, match=r"^--advertise must name an address of this machine: there"
    ):
        Advertised.parse(None, "router.invalid:5600")
    with pytest.raises(OSError, match="not known"):
        own_address("router.invalid")


@pytest.mark.parametrize(
    "given", ["", ":", ":0", ":70000", "a:b:c", "[::1]:", "a,b", "[a]:1", "a:0"]
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^--advertise must be HOST, HOST:PORT or :PORT, where"):
        Advertised.parse(given)


@given(own=st.ip_addresses(), peer=st.ip_addresses())
@example(own=ip_address("127.0.0.1"), peer=ip_address("10.0.0.1"))
@example(own=ip_address("127.0.1.1"), peer=ip_address("127.0.0.1"))
@example(own=ip_address("fe80::1%eth0"), peer=ip_address("fe80::2%eth0"))
@example(own=ip_address("169.254.3.4"), peer=ip_address("10.0.0.1"))
@example(own=ip_address("fd00::2"), peer=ip_address("fd00::1"))
def test_no_peer_elsewhere_is_told_an_address_that_counts_here_alone(
    own: Address, peer: Address
) -> None:
    is_here = peer.is_loopback or peer.is_unspecified
    if own.is_link_local or own.is_unspecified or (own.is_loopback and not is_here | (own == peer)):
        with pytest.raises(OSError, match=re.escape(str(own))):
            check_reachable(str(own), str(peer))
    else:
        check_reachable(str(own), str(peer))


def test_the_first_address_of_a_router_that_can_reach_this_machine_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [_resolved("fe80::7%lo"), _resolved("127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert Advertised.parse(None, "router:5600") == Advertised("127.0.0.1", None)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
    with pytest.raises(ConfigError, match="--advertise must name an address of this machine"):
        Advertised.parse(None, "router:5600")


def _resolved(address: str) -> tuple[object, ...]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    where = (address, 9, 0, 1) if ":" in address else (address, 9)
    return family, socket.SOCK_DGRAM, 0, "", where
