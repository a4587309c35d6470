# SPDX-License-Identifier: Apache-2.0
"""Workers as actors on the nodes of a Ray cluster.

A replica is one placement group (`pagoda.executor.placement`). Ray grants all bundles or none, so two replicas
never wait for each other's halves. Each rank is an actor that runs the same worker process as on one host; plans
and results go over Pagoda's own sockets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagoda.errors import ConfigError
from pagoda.executor.base import WorkerLost
from pagoda.executor.launcher import OutsideEnds, worker_name
from pagoda.executor.placement import (
    RankPlacement,
    neighbours_first,
    plan_placement,
    workers_on_host,
)
from pagoda.messages.worker import PROTOCOL_VERSION
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.ray.rank import HostFacts, RankActor, RankEnd
from pagoda.telemetry.logging import LOG_LEVEL_ENV
from pagoda.version import __version__

RAY_ADDRESS_ENV = "RAY_ADDRESS"
CLUSTER_AWAY_S = 120.0
"""Seconds for which an engine that starts waits for a cluster that was there before."""
_RETRY_S = 1.0
_CONNECT_TIMEOUT_S = 5
_PATIENCE_S = 5
"""Seconds without room in the cluster after which the log says so."""

_log = logging.getLogger(__name__)


class RayLauncher:
    """Starts workers on a cluster that is there already; this host must be one of its nodes."""

    first_word_s = 300.0
    """Ray starts an actor first, which imports Pagoda, perhaps from a slow disk of another host."""

    def __init__(
        self,
        address: str | None,
        parallel: ParallelConfig,
        threads: int | None,
        *,
        was_there: bool = False,
    ) -> None:
        """`address` is the cluster's, `host:port`; None takes `RAY_ADDRESS`, or the cluster that this host is in.
        One that `was_there` before is waited for: its head may have died, and come back.

        Raises ConfigError if there is no such cluster, or its nodes have too few cores for all ranks.
        """
        address = address or os.environ.get(RAY_ADDRESS_ENV) or "auto"
        retry(partial(_connect, address), CLUSTER_AWAY_S if was_there else 0.0)
        self.node_address = _nodes()[ray.get_runtime_context().get_node_id()].address
        """Address at which other nodes reach this host."""
        cores = [node.cores for node in _nodes().values() if node.cores]
        self._placement = plan_placement(cores, parallel, threads)
        self._outside_ends = OutsideEnds()
        self._last: RayWorkers | None = None

    def launch(self, configs: Sequence[WorkerConfig], address: str) -> RayWorkers:
        self._last = RayWorkers(
            configs, address, self._placement, self._outside_ends, after=self._last
        )
        return self._last


def retry(
    connect: Callable[[], None], patience_s: float, wait: Callable[[float], None] = time.sleep
) -> None:
    """Calls `connect` until it raises no ConfigError, for `patience_s` of waiting at most. Raises the last one."""
    waited_s = 0.0
    while True:
        try:
            connect()
            return
        except ConfigError as error:
            if waited_s >= patience_s:
                raise
            if not waited_s:
                _log.warning("waiting for the cluster to come back: %s", error)
        wait(_RETRY_S)
        waited_s += _RETRY_S


class RayWorkers:
    """One placement group and its actors. A thread waits for Ray; the engine's loop is woken through a socket."""

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        address: str,
        placement: RankPlacement,
        outside_ends: OutsideEnds,
        after: RayWorkers | None,
    ) -> None:
        """Starts once the workers of `after` have given back what they held."""
        self._configs = configs
        self._address = address
        self._placement = placement
        self._outside_ends = outside_ends
        self._lost: WorkerLost | None = None
        self._actors: list[Any] = []
        self._is_closed = False
        self.are_placed = False
        self._lock = threading.Lock()
        self._bell, self._ringer = socket.socketpair()
        previous = after._thread.join if after is not None else None
        self._thread: threading.Thread = threading.Thread(
            target=self._run, args=(previous,), name="ray-workers", daemon=True
        )
        self._thread.start()

    def pollables(self) -> list[object]:
        return [self._bell]

    @property
    def pids(self) -> dict[str, int]:
        """Empty: the workers may be on any node."""
        return {}

    def lost(self) -> WorkerLost | None:
        return self._lost

    def explained(self, loss: WorkerLost) -> WorkerLost:
        """The same loss: what became of a process on another node is not known."""
        return loss

    def close(self) -> None:
        """Kills all actors without waiting, since a node that is gone would not answer. The next set waits."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for actor in self._actors:
                try:
                    ray.kill(actor)
                except (
                    Exception
                ) as error:  # of many types; its node is gone, and the others must end all the same
                    _log.warning("a Ray actor could not be ended: %s", _first_line(error))
        self._bell.close()

    def _run(self, previous: Callable[[], None] | None) -> None:
        if previous is not None:
            previous()
        group: PlacementGroup | None = None
        loss = WorkerLost("the workers ended")
        try:
            group = placement_group(
                [{"CPU": self._placement.cores_per_bundle}] * self._placement.num_bundles,
                strategy="PACK",
            )
            if self._await_room(group):
                loss = self._watch_workers(group)
        except Exception as error:  # of many types, from Ray and from gRPC
            loss = WorkerLost(f"the workers could not be placed by Ray: {_first_line(error)}")
        finally:
            self._lost = loss
            with contextlib.suppress(OSError):
                self._ringer.send(b"\0")
            self._ringer.close()
            if group is not None:
                with contextlib.suppress(Exception):
                    remove_placement_group(group)

    def _await_room(self, group: PlacementGroup) -> bool:
        """Returns True once the group is placed, False when it is no longer wanted."""
        waited_s = 0
        while not self._is_closed:
            if group.wait(timeout_seconds=1):
                self.are_placed = True
                return True
            waited_s += 1
            if waited_s == _PATIENCE_S:
                _log.warning(
                    "waiting for %d × %d free cores in the Ray cluster, whose nodes have %s",
                    self._placement.num_bundles,
                    self._placement.cores_per_bundle,
                    ", ".join(str(node.cores) for node in _nodes().values()) or "none",
                )
        return False

    def _watch_workers(self, group: PlacementGroup) -> WorkerLost:
        """Starts the workers, and waits until the first of them ends."""
        actors = self._make_actors(group)
        if not actors:
            return WorkerLost("the workers were not wanted any more")
        described: list[bytes] = ray.get([actor.describe.remote() for actor in actors])
        facts = [msgspec.msgpack.decode(found, type=HostFacts) for found in described]
        nodes = _nodes()
        for fact in facts:
            if fact.node_id not in nodes:
                return WorkerLost("a worker was lost with its node")
            if not _same_version(fact):
                stranger = _describe_stranger(fact, nodes[fact.node_id].address)
                return WorkerLost(stranger, is_user_error=True)
        order = neighbours_first([fact.node_id for fact in facts])
        configs = self._on_hosts([facts[index] for index in order], nodes)
        log_level = os.environ.get(LOG_LEVEL_ENV, "warning")
        ends = {}
        for config, index in zip(configs, order, strict=True):
            encoded = msgspec.msgpack.encode(config)
            end = actors[index].run.remote(encoded, self._address, log_level)
            ends[end] = (config, facts[index].node_id)
        (first, *_), _ = ray.wait(list(ends), num_returns=1)
        return _describe_loss(first, *ends[first], self._outside_ends)

    def _make_actors(self, group: PlacementGroup) -> list[Any]:
        """One for each rank; killed at once if nobody wants them any more."""
        make = ray.remote(RankActor).options
        with self._lock:
            if not self._is_closed:
                self._actors = [
                    make(
                        num_cpus=self._placement.threads,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(
                            group, placement_group_bundle_index=bundle
                        ),
                    ).remote()
                    for bundle in range(self._placement.num_bundles)
                    for _ in range(self._placement.ranks_per_bundle)
                ]
            return self._actors

    def _on_hosts(
        self, facts: Sequence[HostFacts], nodes: Mapping[str, _RayNode]
    ) -> list[WorkerConfig]:
        count = Counter(fact.node_id for fact in facts)
        threads = self._placement.threads
        return [
            msgspec.structs.replace(
                config,
                num_threads=threads,
                bind_host=nodes[fact.node_id].address,
                host_memory_bytes=fact.memory_bytes,
                workers_on_host=workers_on_host(
                    count[fact.node_id], nodes[fact.node_id].cores, threads, config.parallel
                ),
            )
            for config, fact in zip(self._configs, facts, strict=True)
        ]


class _RayNode(msgspec.Struct, frozen=True):
    address: str
    """Address at which other nodes reach the node."""
    cores: int


def _nodes() -> dict[str, _RayNode]:
    return {
        node["NodeID"]: _RayNode(node["NodeManagerAddress"], int(node["Resources"].get("CPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    }


def _connect(address: str) -> None:
    if address == "local" or "://" in address:
        raise ConfigError(
            f"--ray-address takes host:port of a Ray cluster that this host has joined, got {address!r}."
        )
    if address != "auto":
        _check_reachable(address)
    at_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, configure_logging=False)
    except Exception as error:  # of many types, from Ray and from gRPC
        raise _unreachable(address, error) from None
    finally:
        # Ray would end this process at once, but the frontend lets running answers finish first.
        signal.signal(signal.SIGTERM, at_sigterm)


def _check_reachable(address: str) -> None:
    """Tries the port first: Ray would ask an address where nobody listens for most of a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> ConfigError:
    where = "" if address == "auto" else f" at {address}"
    return ConfigError(
        f"No Ray cluster can be reached{where} ({_first_line(error)}); "
        "start one with `ray start --head`, or name it with --ray-address."
    )


def _same_version(facts: HostFacts) -> bool:
    return (facts.version, facts.protocol_version) == (__version__, PROTOCOL_VERSION)


def _describe_stranger(facts: HostFacts, address: str) -> str:
    return (
        f"Node {address} has Pagoda {facts.version} (protocol {facts.protocol_version}), this host "
        f"{__version__} (protocol {PROTOCOL_VERSION}); install the same version on all nodes."
    )


def _describe_loss(
    ref: ray.ObjectRef[bytes], config: WorkerConfig, node_id: str, outside_ends: OutsideEnds
) -> WorkerLost:
    name = f"{worker_name(config)} on {config.bind_host}"
    try:
        end = msgspec.msgpack.decode(ray.get(ref), type=RankEnd)
        return outside_ends.loss(f"{name} {end.how}", is_from_outside=end.is_from_outside)
    except RayError as error:
        if node_id not in _nodes():
            return WorkerLost(f"{name} was lost with its node")
        return WorkerLost(f"{name} was lost with its Ray actor: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
