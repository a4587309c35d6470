# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.plugins.ray.launcher import retry


class Cluster:
    """A cluster that is there from the n-th connection on, and the time that was waited for it."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.waited_s = 0.0

    def connect(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise ConfigError("There is no cluster.")

    def wait(self, seconds: float) -> None:
        self.waited_s += seconds


def test_a_cluster_that_was_there_is_waited_for() -> None:
    cluster = Cluster(num_failures=3)
    retry(cluster.connect, 120, cluster.wait)
    assert cluster.waited_s == 3


@pytest.mark.parametrize("patience_s", [0, 5])
def test_a_cluster_that_stays_away_is_an_error(patience_s: float) -> None:
    cluster = Cluster(num_failures=100)
    with pytest.raises(ConfigError, match="no cluster"):
        retry(cluster.connect, patience_s, cluster.wait)
    assert cluster.waited_s == patience_s


_WITHOUT_A_CLUSTER = """
import msgspec
from pagoda.errors import ConfigError
from pagoda.llm.engine_options import EngineOptions
from pagoda.plugins.ray import EXECUTOR

config = EngineOptions().engine_config("pagoda-tiny")
try:
    EXECUTOR.open(msgspec.structs.replace(config, ray_address="127.0.0.1:1"), None, None)
except ConfigError as error:
    print(error)

import ray
try:
    ray.put(0)
except Exception as error:
    print(error)
print(ray.is_initialized())
"""


def test_no_call_of_ray_starts_a_cluster(tmp_path: Path) -> None:
    """Those that end actors come behind the end of the connection, too."""
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_A_CLUSTER],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    refusal, error, is_there = ended.stdout.splitlines()
    assert "No Ray cluster can be reached at 127.0.0.1:1" in refusal
    assert "Ray has not been started yet" in error
    assert is_there == "False"
    assert not list(tmp_path.iterdir())
