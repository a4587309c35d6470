# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket

import pytest

from pagoda.errors import ConfigError
from pagoda.ipc.addresses import Advertised, bracketed, is_host, numeric, own_address, parse_address


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
    ("given", "host", "port"),
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
def test_what_a_host_advertises(given: str | None, host: str, port: int | None) -> None:
    assert Advertised.parse(given) == Advertised(host, port)


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
