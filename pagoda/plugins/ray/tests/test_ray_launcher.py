# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

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
