"""Mistakes in the flags of routers, and of hosts that serve them: one sentence each."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from pagoda.cli.main import EXIT_USAGE, main


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text("x" * 32)
    return f"--cluster-key-file={path}"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["route"], r"pagoda route needs --cluster-key-file, a file that all hosts and routers"),
        (
            ["route", "KEY", "--discovery=etcd://h:1/p", "--join-listen=h:1"],
            r"--discovery and --join-listen exclude each other",
        ),
        (["route", "KEY", "--discovery=etcd://h:2379"], r"--discovery must be etcd://HOST:PORT/"),
        (["route", "KEY", "--discovery=etcd://h:2379/"], r"--discovery must be etcd://HOST:PORT/"),
        (["route", "KEY", "--discovery=etcd://h/p"], r"--discovery must be HOST:PORT"),
        (["route", "KEY", "--discovery=etcd://a:1,b/p"], r"--discovery must be HOST:PORT.*'b'"),
        (["route", "KEY", "--join-listen=h"], r"--join-listen must be HOST:PORT"),
        (["route", "KEY", "--join-listen=h:99999"], r"--join-listen must be HOST:PORT"),
        (["route", "KEY", "--join=h"], r"--join must be HOST:PORT"),
        (["route", "KEY", "--advertise=h:x", "--join=h:1"], r"--advertise must be HOST:PORT"),
        (["serve", "--join=h:1"], r"--join needs --cluster-key-file"),
        (["serve", "--advertise=h:5601"], r"--advertise with a port needs --cluster-key-file"),
        (["serve", "KEY"], r"--cluster-key-file needs --join, --role, or --advertise with a port"),
        (["serve", "KEY", "--join=etcd://h:1"], r"--join must be etcd://HOST:PORT/PREFIX"),
        (["serve", "KEY", "--join=a:1,b:0"], r"--join must be HOST:PORT.*'b:0'"),
        (
            ["serve", "KEY", "--role=decode", "--advertise=::1"],
            r"--advertise must be .* an IPv4 addr",
        ),
        (["serve", "KEY", "--role=decode", "--advertise=[::1]"], r"--advertise must be .* an IPv4"),
        (["serve", "KEY", "--join=[::1]:1", "--advertise=a"], r"--join must be .* an IPv4 address"),
        (["serve", "KEY", "--join=a:1", "--advertise=a/b"], r"--advertise must be HOST or HOST:PO"),
    ],
)
def test_a_mistake_is_one_sentence(
    flags: list[str], sentence: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([key if flag == "KEY" else flag for flag in flags]) == EXIT_USAGE
    error = capsys.readouterr().err.strip()
    assert re.search(sentence, error)
    assert error.count("\n") == 0


def test_a_file_of_hosts_that_is_wrong_ends_the_router_with_its_line(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("10.0.0.1:5601\n10.0.0.2\n")
    assert main(["route", key, "--port=0", f"--discovery={hosts}"]) == EXIT_USAGE
    assert "line 2, must be HOST:PORT" in capsys.readouterr().err


def test_an_address_where_no_host_can_join_ends_the_router(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["route", key, "--port=0", f"--join-listen={listen}"]) == EXIT_USAGE
    assert f"--join-listen {listen} cannot be listened on (Address" in capsys.readouterr().err
