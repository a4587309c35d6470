# SPDX-License-Identifier: Apache-2.0
"""A real etcd of one server, which can be killed and started again with what it had written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from certificates import Certificates
from debian_programs import debian_program
from ports import free_ports

_START_TIMEOUT_S = 20.0


class EtcdServer:
    """Starts at once; without an etcd the test is skipped."""

    def __init__(self, directory: Path, certificates: Certificates | None = None) -> None:
        """With `certificates` clients need one, too."""
        self._directory = directory
        self._certificates = certificates
        ports = free_ports(2)
        self.address, self._peer = (f"127.0.0.1:{port}" for port in ports)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        scheme = "http" if self._certificates is None else "https"
        client, peer = f"{scheme}://{self.address}", f"http://{self._peer}"
        self._process = subprocess.Popen(
            [
                debian_program("etcd", package="etcd-server"),
                *("--data-dir", str(self._directory)),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"default={peer}", "--heartbeat-interval", "20"),
                *self._tls_flags(),
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

    def _tls_flags(self) -> list[str]:
        if self._certificates is None:
            return []
        files = self._certificates
        return [
            *("--cert-file", str(files.certificate), "--key-file", str(files.key)),
            *("--trusted-ca-file", str(files.authority), "--client-cert-auth"),
        ]

    def _answers(self) -> bool:
        scheme, context = "http", None
        if self._certificates is not None:
            scheme, context = "https", self._certificates.client_context()
        url = f"{scheme}://{self.address}/health"
        try:
            with urllib.request.urlopen(url, timeout=1, context=context) as answer:
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
