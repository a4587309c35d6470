"""A real etcd of one server, which can be killed and started again with what it had written."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

_FETCH_TIMEOUT_S = 30
_APT = (
    *("apt-get", "--quiet", "--option=Acquire::Retries=0"),
    *(f"--option=Acquire::{scheme}::Timeout=3" for scheme in ("http", "https")),
)
"""Gives up soon where nothing can be reached."""
_START_TIMEOUT_S = 20.0


@functools.cache
def etcd_program() -> str:
    """The path of etcd; where there is none it is fetched from Debian, and nothing is installed. Else skips."""
    found = shutil.which("etcd")
    if found is not None:
        return found
    if shutil.which("apt-get") is None:
        pytest.skip("there is no etcd, and no apt-get to fetch it with")
    directory = tempfile.mkdtemp(prefix="pagoda-etcd-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with open(__file__, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the test run may do the same
        problem = _fetch(directory)
    if problem:
        pytest.skip(f"there is no etcd, and etcd-server cannot be fetched ({problem})")
    return f"{directory}/usr/bin/etcd"


def _fetch(directory: str) -> str:
    """Why there is no etcd in `directory` now; empty if there is."""
    problem = _run(directory, *_APT, "download", "etcd-server")
    if problem and os.geteuid() == 0:
        problem = _run(directory, *_APT, "--error-on=any", "update")
        problem = problem or _run(directory, *_APT, "download", "etcd-server")
    for package in Path(directory).glob("*.deb"):
        return _run(directory, "dpkg-deb", "--extract", package.name, ".")
    return problem


def _run(directory: str, *command: str) -> str:
    """The last line of what went wrong; empty if nothing did."""
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} takes longer than {_FETCH_TIMEOUT_S} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason"])[-1]


class EtcdServer:
    """Starts at once; without an etcd the test is skipped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ports = _free_ports(2)
        self.address, self._peer = (f"127.0.0.1:{port}" for port in ports)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        client, peer = f"http://{self.address}", f"http://{self._peer}"
        self._process = subprocess.Popen(
            [
                etcd_program(),
                *("--data-dir", str(self._directory)),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"default={peer}", "--heartbeat-interval", "20"),
                *("--election-timeout", "200", "--log-level", "error", "--logger", "zap"),
            ],
            env=_environment(),
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("etcd does not start.")
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """What it had written is lost."""
        self.kill()
        shutil.rmtree(self._directory)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=1) as answer:
                return b"true" in answer.read()
        except OSError:
            return False


def _environment() -> dict[str, str]:
    """etcd 3.4 starts elsewhere than on x86-64 only when it is told that this is meant."""
    machine = os.uname().machine
    if machine == "x86_64":
        return dict(os.environ)
    names = {"aarch64": "arm64"}
    return {**os.environ, "ETCD_UNSUPPORTED_ARCH": names.get(machine, machine)}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [free.getsockname()[1] for free in sockets]
    finally:
        for free in sockets:
            free.close()
