# SPDX-License-Identifier: Apache-2.0
"""The router of a planner: figures of its `/metrics` and `/v1/hosts`, and orders to its hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pagoda.cli.openai_client import OpenAIClient, ServerError
from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.figures import Figures, HostFigures, PoolFigures, RoleChange, Slo

_SERVING = ("ready", "degraded")
_LATE, _SLOW = "pagoda_time_to_first_token_seconds", "pagoda_request_time_per_output_token_seconds"


class _Host(msgspec.Struct, frozen=True):
    model: str
    state: str
    id: str | None = None
    role: Role = Role.NONE
    roles: tuple[Role, ...] = ()
    num_requests: int = 0


class _Hosts(msgspec.Struct, frozen=True):
    data: tuple[_Host, ...]


@dataclass
class Counts:
    """Series of one pool, summed over all labels but the bounds of histograms."""

    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bounds: dict[str, dict[float, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    """Counts of a histogram's values up to each bound."""


def counts_of(metrics: str) -> dict[str, Counts]:
    """The series of a text of `/metrics` by the model that they are of. Raises ValueError: it is no such text."""
    pools: dict[str, Counts] = defaultdict(Counts)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.labels.get("model_name")
            if name is None:
                continue
            if sample.name.endswith("_bucket"):
                of = pools[name].bounds[sample.name.removesuffix("_bucket")]
                of[float(sample.labels["le"])] += sample.value
            else:
                pools[name].values[sample.name] += sample.value
    return pools


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
        names = ("running", "waiting", "awaiting_kv", "unplaced")
        return sum(counts.values.get(f"pagoda_num_requests_{one}", 0.0) for one in names)

    queries = grown("pagoda_prefix_cache_queries_total")
    cached = min(1.0, grown("pagoda_prefix_cache_hits_total") / queries) if queries else 0.0
    waiting = sum(
        now.values.get(f"pagoda_num_requests_{it}", 0.0) for it in ("waiting", "unplaced")
    )
    arrivals = grown("pagoda_requests_total") + in_flight(now) - in_flight(before)
    return PoolFigures(
        name=name,
        window_s=window_s,
        num_arrivals=max(0, round(arrivals)),
        prompt_tokens=round(mean("pagoda_request_prompt_tokens") * (1 - cached), 3),
        output_tokens=round(mean("pagoda_request_generated_tokens"), 3),
        num_waiting=max(0, round(waiting)),
        late_share=_above(now.bounds.get(_LATE, {}), before.bounds.get(_LATE, {}), slo.ttft_s),
        slow_share=_above(now.bounds.get(_SLOW, {}), before.bounds.get(_SLOW, {}), slo.tpot_s),
        hosts=hosts,
    )


def _above(now: Mapping[float, float], before: Mapping[float, float], limit: float) -> float:
    """The part of a histogram's values between two readings that is above its lowest bound from `limit` on."""
    if not now:
        return 0.0
    bound, most = min(bound for bound in now if bound >= limit), max(now)
    whole = now[most] - before.get(most, 0.0)
    within = now[bound] - before.get(bound, 0.0)
    return round(min(1.0, max(0.0, 1 - within / whole)), 6) if whole > 0 else 0.0


class RouterLink:
    """A router over HTTP."""

    def __init__(self, client: OpenAIClient, slo: Slo) -> None:
        """`client` is connected to the router."""
        self._client = client
        self._slo = slo
        self._before: tuple[float, dict[str, Counts]] | None = None

    async def figures(self, at_s: float) -> Figures | None:
        """Figures since the last call; None for the first one. Raises ServerError: the router does not give them,
        ConfigError: it cannot be reached."""
        hosts = defaultdict[str, list[HostFigures]](list)
        for host in (await self._hosts()).data:
            if host.id is not None and host.state in _SERVING:
                hosts[host.model].append(
                    HostFigures(
                        id=host.id,
                        role=host.role,
                        roles=host.roles,
                        num_requests=max(0, host.num_requests),
                    )
                )
        try:
            counts = counts_of((await self._get("/metrics")).decode())
        except ValueError:
            raise ServerError("/metrics of the router is not in Prometheus' text format.") from None
        before, self._before = self._before, (at_s, counts)
        if before is None or before[0] >= at_s:
            return None
        names = sorted(hosts.keys() | counts.keys())
        pools = (
            pool_figures(
                name,
                self._slo,
                at_s - before[0],
                counts.get(name, Counts()),
                before[1].get(name, Counts()),
                tuple(sorted(hosts[name], key=lambda host: host.id)),
            )
            for name in names
        )
        return Figures(at_s=at_s, pools=tuple(pools))

    async def change(self, change: RoleChange) -> None:
        """Gives a host another role. Raises as `figures`."""
        path, body = f"/v1/hosts/{change.host_id}", {"role": str(change.role)}
        status, answer = await self._client.post_raw(path, body, "PATCH")
        if status != 200:
            raise ServerError(
                f"The router refused {path} ({status}): {answer[:200].decode(errors='replace')}"
            )

    async def _hosts(self) -> _Hosts:
        try:
            return msgspec.json.decode(await self._get("/v1/hosts"), type=_Hosts)
        except msgspec.DecodeError as error:
            raise ServerError(
                f"/v1/hosts of the router is not a list of hosts ({error})."
            ) from None

    async def _get(self, path: str) -> bytes:
        status, answer = await self._client.post_raw(path, None, "GET")
        if status != 200:
            raise ServerError(
                f"The router answered {path} with the status {status}; it must be a pagoda route."
            )
        return answer
