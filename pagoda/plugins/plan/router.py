# SPDX-License-Identifier: Apache-2.0
"""The routers of a planner: figures of their `/metrics` and `/v1/hosts`, and orders to their hosts."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from pagoda.cli.openai_client import OpenAIClient, ServerError
from pagoda.errors import PagodaError
from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.figures import Figures, HostFigures, PoolFigures, RoleChange, Slo

_SERVING = ("ready", "degraded")
_PLACED, _UNPLACED = "placed requests", "pagoda_num_requests_unplaced"
_LATE, _SLOW = "pagoda_time_to_first_token_seconds", "pagoda_request_time_per_output_token_seconds"
_MOST = 1e12
"""Numbers beyond are none of a router."""

_log = logging.getLogger(__name__)


class ListedHost(msgspec.Struct, frozen=True):
    """A host as `/v1/hosts` lists it."""

    model: str
    state: str
    id: str | None = None
    role: Role = Role.NONE
    roles: tuple[Role, ...] = ()
    num_requests: int = 0


class _Hosts(msgspec.Struct, frozen=True):
    data: tuple[ListedHost, ...]


@dataclass
class Counts:
    """Series of one pool, summed over all labels but the bounds of histograms."""

    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bounds: dict[str, dict[float, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """Counts of a histogram's values up to each bound."""


@dataclass(frozen=True)
class Reading:
    """Series and hosts of one router."""

    metrics: str = ""
    hosts: tuple[ListedHost, ...] = ()


def counts_of(readings: Sequence[Reading]) -> dict[str, Counts]:
    """The series of all routers by their model. Figures of requests are added up; those of a replica, which every
    router tells that has it, count once. Raises ValueError: a text is none of `/metrics`."""
    pools: dict[str, Counts] = defaultdict(Counts)
    of_replicas: dict[tuple[str, str, str], float] = {}
    for reading in readings:
        for family in text_string_to_metric_families(reading.metrics):
            for sample in family.samples:
                labels, series = sample.labels, sample.name
                name = labels.get("model_name")
                if name is None or not abs(sample.value) <= _MOST:
                    continue
                if "replica" in labels:
                    key = name, series, labels["replica"]
                    of_replicas[key] = max(of_replicas.get(key, 0.0), sample.value)
                elif series.endswith("_bucket"):
                    of = pools[name].bounds[series.removesuffix("_bucket")]
                    of[float(labels.get("le", ""))] += sample.value
                else:
                    pools[name].values[series] += sample.value
        for host in reading.hosts:
            pools[host.model].values[_PLACED] += host.num_requests
    for (name, series, _), value in of_replicas.items():
        pools[name].values[series] += value
    return pools


def hosts_of(readings: Sequence[Reading]) -> dict[str, tuple[HostFigures, ...]]:
    """The hosts of all routers by model, with the requests that they have of all, in the order of their ids."""
    found: dict[str, ListedHost] = {}
    for host in (host for reading in readings for host in reading.hosts):
        if host.id is not None and host.state in _SERVING:
            before = found.get(host.id)
            others = 0 if before is None else before.num_requests
            found[host.id] = replace(host, num_requests=host.num_requests + others)
    pools = defaultdict[str, list[HostFigures]](list)
    for host_id, host in sorted(found.items()):
        figures = HostFigures(
            id=host_id, role=host.role, roles=host.roles, num_requests=_whole(host.num_requests)
        )
        pools[host.model].append(figures)
    return {name: tuple(hosts) for name, hosts in pools.items()}


def pool_figures(
    name: str,
    slo: Slo,
    window_s: float,
    now: Counts,
    before: Counts,
    hosts: tuple[HostFigures, ...],
) -> PoolFigures:
    """The figures of a window between two readings of the series. Counters that begin anew count from zero."""

    def grown(series: str) -> float:
        new, old = now.values.get(series, 0.0), before.values.get(series, 0.0)
        return new - old if new >= old else new

    def mean(series: str) -> float:
        count = grown(f"{series}_count")
        return grown(f"{series}_sum") / count if count else 0.0

    def in_flight(counts: Counts) -> float:
        return counts.values.get(_PLACED, 0.0) + counts.values.get(_UNPLACED, 0.0)

    queries = grown("pagoda_prefix_cache_queries_total")
    cached = min(1.0, grown("pagoda_prefix_cache_hits_total") / queries) if queries else 0.0
    waiting = now.values.get("pagoda_num_requests_waiting", 0.0) + now.values.get(_UNPLACED, 0.0)
    arrivals = grown("pagoda_requests_total") + in_flight(now) - in_flight(before)
    return PoolFigures(
        name=name,
        window_s=window_s,
        num_arrivals=_whole(arrivals),
        prompt_tokens=_amount(mean("pagoda_request_prompt_tokens") * (1 - cached)),
        output_tokens=_amount(mean("pagoda_request_generated_tokens")),
        num_waiting=_whole(waiting),
        late_share=_above(now.bounds.get(_LATE, {}), before.bounds.get(_LATE, {}), slo.ttft_s),
        slow_share=_above(now.bounds.get(_SLOW, {}), before.bounds.get(_SLOW, {}), slo.tpot_s),
        hosts=hosts,
    )


def _amount(value: float) -> float:
    """The value as figures have it, whatever a router says."""
    return round(min(max(value, 0.0), _MOST), 3)


def _whole(value: float) -> int:
    return round(_amount(value))


def _above(now: Mapping[float, float], before: Mapping[float, float], limit: float) -> float:
    """The part of a histogram's values between two readings that is above its lowest bound from `limit` on."""
    if not now:
        return 0.0
    bound, most = min(bound for bound in now if bound >= limit), max(now)
    whole = now[most] - before.get(most, 0.0)
    within = now[bound] - before.get(bound, 0.0)
    return round(min(1.0, max(0.0, 1 - within / whole)), 6) if whole > 0 else 0.0


class Windows:
    """Figures between one reading of all routers and the next."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._before: tuple[float, dict[str, Counts]] | None = None

    def figures(self, at_s: float, readings: Sequence[Reading]) -> Figures | None:
        """Figures since the last call; None for the first one. Raises ValueError as `counts_of`."""
        counts, hosts = counts_of(readings), hosts_of(readings)
        before, self._before = self._before, (at_s, counts)
        if before is None or before[0] >= at_s:
            return None
        pools = (
            pool_figures(
                name,
                self._slo,
                at_s - before[0],
                counts.get(name, Counts()),
                before[1].get(name, Counts()),
                hosts.get(name, ()),
            )
            for name in sorted(hosts.keys() | counts.keys())
        )
        return Figures(at_s=at_s, pools=tuple(pools))


class RouterLink:
    """The routers of one fleet over HTTP."""

    def __init__(self, clients: Sequence[OpenAIClient], slo: Slo) -> None:
        """Each of `clients` is connected to one router."""
        self._clients = clients
        self._windows = Windows(slo)
        self._readings = [Reading() for _ in clients]

    async def figures(self, at_s: float) -> Figures | None:
        """Figures since the last call; None for the first one. Of a router that does not answer, what it said last
        stands. Raises ServerError: no router gives them, ConfigError: none can be reached."""
        readings = await asyncio.gather(*map(self._read, self._clients), return_exceptions=True)
        errors = [one for one in readings if isinstance(one, BaseException)]
        for error in errors:
            if len(errors) == len(readings) or not isinstance(error, PagodaError):
                raise error
            _log.warning("a router is left out: %s", error)
        self._readings = [
            old if isinstance(new, BaseException) else new
            for old, new in zip(self._readings, readings, strict=True)
        ]
        try:
            return self._windows.figures(at_s, self._readings)
        except ValueError:
            raise ServerError("/metrics of a router is not in Prometheus' text format.") from None

    async def change(self, change: RoleChange) -> None:
        """Gives a host another role, by the first router that has it. Raises as `figures`."""
        path = f"/v1/hosts/{quote(change.host_id, safe='')}"
        body = {"role": str(change.role)}
        answer = b""
        for client, reading in zip(self._clients, self._readings, strict=True):
            if any(host.id == change.host_id for host in reading.hosts):
                status, answer = await client.post_raw(path, body, "PATCH")
                if status == 200:
                    return
        raise ServerError(f"The router refused it: {answer[:200].decode(errors='replace')}")

    async def _read(self, client: OpenAIClient) -> Reading:
        try:
            hosts = msgspec.json.decode(await _get(client, "/v1/hosts"), type=_Hosts)
            return Reading((await _get(client, "/metrics")).decode(), hosts.data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerError(f"A router gives no figures ({error}).") from None


async def _get(client: OpenAIClient, path: str) -> bytes:
    status, answer = await client.post_raw(path, None, "GET")
    if status != 200:
        raise ServerError(
            f"The router answered {path} with the status {status}; it must be a pagoda route."
        )
    return answer
