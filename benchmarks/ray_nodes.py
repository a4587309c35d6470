# SPDX-License-Identifier: Apache-2.0
"""Nodes of a Ray cluster as processes of this one, for tests and trials."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

import pagoda

QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""Ray's own settings wait for half a minute before a node that went away counts as dead."""
_SETTINGS_OF_NODES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
"""A head asks for the token in ~/.ray otherwise, if there is one, which no other node sends."""
_START_TIMEOUT_S = 60
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class RayNode:
    """`ray start` in the foreground, with cores to give away."""

    def __init__(
        self, arguments: list[str], log: Path, num_cpus: int, own_disk: Path | None = None
    ) -> None:
        """Returns when the node has joined. It sees a file system of its own at `own_disk`, which is there."""
        apart: list[str] = []
        if own_disk is not None:
            script = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
            apart = ["unshare", "--mount", "sh", "-c", script, str(own_disk)]
        source = str(Path(pagoda.__file__).parents[1])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [
                    *apart,
                    *_RAY,
                    "start",
                    "--block",
                    f"--num-cpus={num_cpus}",
                    "--object-store-memory=78643200",
                    "--min-worker-port=0",
                    "--max-worker-port=0",
                    "--disable-usage-stats",
                    *arguments,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, **_SETTINGS_OF_NODES},
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while "Ray runtime started" not in log.read_text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"ray start failed:\n{log.read_text()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills as a power cut does: SIGKILL for the raylet and all that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            node = psutil.Process(self._process.pid)
            processes = [node, *node.children(recursive=True)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=10)
        self._process.wait()


class RayCluster:
    """A head and any number of other nodes."""

    def __init__(
        self, directory: Path, head_host: str, port: int, settings: Mapping[str, int]
    ) -> None:
        self._directory = directory
        self._num_nodes = 0
        self._nodes: list[RayNode] = []
        self.address = f"{head_host}:{port}"
        self._head_arguments = [
            "--head",
            f"--node-ip-address={head_host}",
            f"--port={port}",
            f"--temp-dir={directory}",
            "--include-dashboard=false",
            f"--system-config={json.dumps(dict(settings))}",
        ]
        self._head = self._add(*self._head_arguments)

    def kill_head(self) -> None:
        """Kills the head and all ranks on its node."""
        self._head.kill()

    def restart_head(self) -> None:
        """Starts a head at the same address, which knows nothing of the cluster before it."""
        self._head = self._add(*self._head_arguments)

    def add(self, address: str, num_cpus: int = 1, own_disk: Path | None = None) -> RayNode:
        place = f"--address={self.address}", f"--node-ip-address={address}"
        return self._add(*place, num_cpus=num_cpus, own_disk=own_disk)

    def _add(self, *arguments: str, num_cpus: int = 1, own_disk: Path | None = None) -> RayNode:
        self._num_nodes += 1
        log = self._directory / f"node{self._num_nodes}.log"
        node = RayNode(list(arguments), log, num_cpus, own_disk)
        self._nodes.append(node)
        return node

    def close(self) -> None:
        for node in reversed(self._nodes):
            node.kill()


@contextlib.contextmanager
def ray_cluster(
    head_host: str, port: int, settings: Mapping[str, int] | None = None
) -> Iterator[RayCluster]:
    """A cluster of one node at `head_host:port`, which others can join, and of which nothing is left behind."""
    # Ray's sockets lie in it, and their paths must be short.
    directory = Path(tempfile.mkdtemp(prefix="ray-"))
    cluster = None
    try:
        cluster = RayCluster(directory, head_host, port, settings or {})
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()
        shutil.rmtree(directory, ignore_errors=True)
