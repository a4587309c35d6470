# SPDX-License-Identifier: Apache-2.0
"""Figures that a plan is made of, and the plan: values that are recorded as they are."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pagoda.messages.worker_config import Role

Positive = Annotated[float, Meta(gt=0, le=1e12)]
Amount = Annotated[float, Meta(ge=0, le=1e12)]
Hosts = Annotated[int, Meta(ge=0, le=100_000)]
Share = Annotated[float, Meta(ge=0, le=1)]

DAY_S = 86400
NUM_BUCKETS = 96
"""Parts of a day in the curve of arrivals: quarters of an hour."""


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Service-level objective: `share` of requests have their first token within `ttft_s`, and their tokens on
    average `tpot_s` apart."""

    ttft_s: Positive = 1.0
    tpot_s: Positive = 0.06
    share: Annotated[float, Meta(ge=0.5, lt=1)] = 0.99


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host: a step takes `step_s` and `token_s` for each of its tokens."""

    step_s: Positive
    token_s: Positive
    max_num_seqs: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 256
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 2048
    """Tokens of the largest step."""
    kv_tokens: Annotated[int, Meta(ge=1, le=2**53)] = 2**53
    """Tokens that the KV cache holds."""


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of a plan. Each pool has the same ones."""

    slo: Slo = Slo()
    capacity: Capacity
    min_hosts: Hosts = 1
    max_hosts: Annotated[int, Meta(ge=1, le=100_000)] = 64
    """Most hosts of a pool, all roles together; never fewer than one of each role."""
    lead_s: Amount = 180.0
    """Seconds from when a host is asked for until it answers."""
    hold_s: Amount = 300.0
    """Seconds for which fewer hosts must do before a pool shrinks."""


class HostFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One host that takes requests."""

    id: str
    role: Role
    roles: tuple[Role, ...] = ()
    """Roles that it may be given."""
    num_requests: Annotated[int, Meta(ge=0, le=2**53)] = 0


class PoolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One pool over a window of time."""

    name: str
    window_s: Positive
    num_arrivals: Annotated[int, Meta(ge=0, le=2**53)]
    prompt_tokens: Amount
    """Mean number of prompt tokens of a request that were not cached."""
    output_tokens: Amount
    num_waiting: Annotated[int, Meta(ge=0, le=2**53)] = 0
    late_share: Share = 0.0
    """Part of the answers of the window whose first token came later than the objective."""
    slow_share: Share = 0.0
    """Part of the tokens of the window that came later after the one before than the objective."""
    hosts: tuple[HostFigures, ...] = ()


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All pools of a router at one instant."""

    at_s: Amount
    """Unix time."""
    pools: tuple[PoolFigures, ...]


class Need(msgspec.Struct, frozen=True, array_like=True):
    """Hosts that a pool needed at an instant, by role."""

    at_s: float
    hosts: dict[Role, int]


class PoolMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Things that are remembered of a pool from one plan to the next."""

    rate: float = 0.0
    """Requests a second, smoothed."""
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    stress: float = 1.0
    """Factor by which the pool takes more than the capacity says, learned from answers that are late."""
    curve: tuple[float, ...] = (0.0,) * NUM_BUCKETS
    """Requests a second by the time of day; 0 where nothing is known yet."""
    bucket: int = -1
    """Part of the day that is being measured; -1 for none."""
    bucket_sum: float = 0.0
    bucket_count: int = 0
    needs: tuple[Need, ...] = ()
    """Needs of the last `hold_s` seconds that no later one exceeds, oldest first."""


class Memory(msgspec.Struct, frozen=True):
    """Memory of a planner, by pool."""

    pools: dict[str, PoolMemory] = {}


class RoleChange(msgspec.Struct, frozen=True):
    """One host that is to have another role."""

    host_id: str
    role: Role


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that a pool is to have."""

    name: str
    rate: float
    """Requests a second that the plan is for, with those that wait."""
    need: dict[Role, int]
    """Hosts by role that this takes at the moment."""
    hosts: dict[Role, int]
    """Hosts by role that are to be there: shrinking waits for `hold_s`."""
    is_enough: bool
    """False if `max_hosts` are too few for the objective."""
    changes: tuple[RoleChange, ...] = ()
    """Changes that hosts which are there can make at once."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for all pools."""

    at_s: float
    pools: tuple[PoolPlan, ...]
