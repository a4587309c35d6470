# SPDX-License-Identifier: Apache-2.0
"""Placement of a server's ranks on the hosts of a cluster, counted in cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from pagoda.errors import ConfigError
from pagoda.parallel.config import ParallelConfig


class RankPlacement(msgspec.Struct, frozen=True):
    """Bundles of cores that one replica needs, each on one host, all or none."""

    threads: int
    """Threads, and cores, of each rank."""
    ranks_per_bundle: int
    num_bundles: int

    @property
    def cores_per_bundle(self) -> int:
        return self.threads * self.ranks_per_bundle


def plan_placement(
    cores_of_hosts: Sequence[int], parallel: ParallelConfig, threads: int | None
) -> RankPlacement:
    """The tensor-parallel ranks of a stage in one bundle, so on one host, where that fits; else each rank alone.

    Without `threads` a rank gets the largest number that leaves room for the ranks of all replicas: with as many
    equal hosts as ranks, a host each.

    Raises ConfigError if the hosts have too few cores.
    """
    threads = threads or _largest_share(cores_of_hosts, parallel.num_ranks)
    tp, ranks = parallel.tensor_parallel_size, parallel.replica_size
    bundles = ranks // tp
    if threads and _room(cores_of_hosts, threads * tp) >= parallel.data_parallel_size * bundles:
        return RankPlacement(threads, ranks_per_bundle=tp, num_bundles=bundles)
    if threads and _room(cores_of_hosts, threads) >= parallel.num_ranks:
        return RankPlacement(threads, ranks_per_bundle=1, num_bundles=ranks)
    hosts = ", ".join(str(cores) for cores in cores_of_hosts) or "none"
    needs = f"{parallel.num_ranks} × {threads or 1} cores"
    raise ConfigError(
        f"The ranks need {needs}, the hosts of the Ray cluster have {hosts}; "
        "add hosts, or lower --threads, --dp, --tp, --cp or --pp."
    )


def _largest_share(cores_of_hosts: Sequence[int], num_ranks: int) -> int:
    shares = range(max(cores_of_hosts, default=0), 0, -1)
    return next((share for share in shares if _room(cores_of_hosts, share) >= num_ranks), 0)


def _room(cores_of_hosts: Sequence[int], cores: int) -> int:
    return sum(host // cores for host in cores_of_hosts)


def neighbours_first(hosts: Sequence[str]) -> list[int]:
    """The order in which ranks take bundles that lie on `hosts`, so that neighbours share a host.

    Hosts with the most bundles come first: a stage that fits on one is not begun on another.
    """
    count = Counter(hosts)
    return sorted(range(len(hosts)), key=lambda index: (-count[hosts[index]], hosts[index], index))


def workers_on_host(own_ranks: int, host_cores: int, threads: int, parallel: ParallelConfig) -> int:
    """The most workers that may share a host: this replica's there, and others' as far as cores are left."""
    others = parallel.num_ranks - parallel.replica_size
    return own_ranks + max(0, min(others, host_cores // threads - own_ranks))
