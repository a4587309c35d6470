# SPDX-License-Identifier: Apache-2.0
"""The policy of a planner: a pure function from figures and memory to a plan and the next memory.

A pool gets what its rate needs: the smoothed one at once, or a higher one that the curve of earlier days foretells
for the time in which hosts start. It shrinks to the most that it needed within `hold_s`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.capacity import hosts_needed
from pagoda.plugins.plan.figures import (
    DAY_S,
    NUM_BUCKETS,
    Figures,
    HostFigures,
    Memory,
    Need,
    Plan,
    PlanConfig,
    PoolFigures,
    PoolMemory,
    PoolPlan,
    RoleChange,
)

_BUCKET_S = DAY_S / NUM_BUCKETS
_SMOOTHING_S = 120.0
_SURPRISE = 3.0
"""Standard deviations by which arrivals of one window must exceed the smoothed rate to count at once."""
_CLEAR_S = 30.0
"""Seconds in which requests that wait are to be computed."""
_RATIO = (0.5, 1.5)
"""Range of how today compares with the curve of earlier days."""
_MOST_STRESS = 2.0
_DIGITS = 6


def decide(config: PlanConfig, memory: Memory, figures: Figures) -> tuple[Plan, Memory]:
    """The plan at an instant, and what is remembered for the next one. Equal arguments give equal results."""
    plans: list[PoolPlan] = []
    pools = dict(memory.pools)
    for pool in figures.pools:
        known = learned(config, pools.get(pool.name, PoolMemory()), pool, figures.at_s)
        plan, pools[pool.name] = _plan_pool(config, known, pool, figures.at_s)
        plans.append(plan)
    return Plan(at_s=figures.at_s, pools=tuple(plans)), Memory(pools)


def learned(config: PlanConfig, memory: PoolMemory, pool: PoolFigures, at_s: float) -> PoolMemory:
    """The memory with the figures of another window."""
    seen = pool.num_arrivals / pool.window_s
    weight = 1 - math.exp(-pool.window_s / _SMOOTHING_S) if memory.bucket >= 0 else 1.0
    rate = memory.rate + weight * (seen - memory.rate)
    expected = memory.rate * pool.window_s
    if pool.num_arrivals > expected + _SURPRISE * math.sqrt(max(expected, 1.0)):
        rate = seen
    # Lengths are those of answers that have ended, of which a window may have none.
    is_first = not memory.prompt_tokens + memory.output_tokens
    share = (1.0 if is_first else weight) if pool.prompt_tokens + pool.output_tokens else 0.0
    bad = max(pool.late_share, pool.slow_share)
    too_bad = bad > 1 - config.slo.share
    stress = memory.stress * (1.05 if too_bad else 0.998 if pool.num_arrivals else 1.0)
    return _measured(
        replace(
            memory,
            rate=_rounded(rate),
            prompt_tokens=_rounded(_mix(memory.prompt_tokens, pool.prompt_tokens, share)),
            output_tokens=_rounded(_mix(memory.output_tokens, pool.output_tokens, share)),
            stress=_rounded(min(max(stress, 1.0), _MOST_STRESS)),
        ),
        seen,
        at_s,
    )


def _measured(memory: PoolMemory, seen: float, at_s: float) -> PoolMemory:
    """The memory with one more rate in the curve of the day."""
    bucket = int(at_s % DAY_S / _BUCKET_S)
    if bucket == memory.bucket:
        return replace(
            memory,
            bucket_sum=_rounded(memory.bucket_sum + seen),
            bucket_count=memory.bucket_count + 1,
        )
    curve = memory.curve
    if memory.bucket_count:
        mean, old = memory.bucket_sum / memory.bucket_count, curve[memory.bucket]
        new = _rounded(max(_mix(old, mean, 0.5) if old else mean, 10.0**-_DIGITS))
        curve = (*curve[: memory.bucket], new, *curve[memory.bucket + 1 :])
    return replace(memory, curve=curve, bucket=bucket, bucket_sum=_rounded(seen), bucket_count=1)


def foretold(memory: PoolMemory, at_s: float, ahead_s: float) -> float:
    """The highest rate that earlier days foretell for the next `ahead_s` seconds, as much above or below them as
    the rate is now; 0 where nothing is known."""
    usual = _usual(memory.curve, at_s)
    if not usual:
        return 0.0
    low, high = _RATIO
    ratio = min(max(memory.rate / usual, low), high)
    steps = max(1, math.ceil(ahead_s / (_BUCKET_S / 3)))
    return ratio * max(_usual(memory.curve, at_s + ahead_s * i / steps) for i in range(steps + 1))


def _usual(curve: Sequence[float], at_s: float) -> float:
    """The curve between the middles of two parts of the day; 0 if one is not known."""
    place = at_s % DAY_S / _BUCKET_S - 0.5
    first = math.floor(place)
    a, b = curve[first % NUM_BUCKETS], curve[(first + 1) % NUM_BUCKETS]
    return _mix(a, b, place - first) if a and b else 0.0


def _plan_pool(
    config: PlanConfig, memory: PoolMemory, pool: PoolFigures, at_s: float
) -> tuple[PoolPlan, PoolMemory]:
    rate = max(memory.rate, foretold(memory, at_s, config.lead_s))
    rate += max(0.0, pool.num_waiting - memory.rate) / _CLEAR_S
    need = needed(config, memory, roles_of(pool.hosts), rate)
    is_enough = sum(need.values()) <= config.max_hosts
    need = _limited(need, config)
    # The clock may have been set back.
    recent = (one for one in memory.needs if at_s - config.hold_s < one.at_s <= at_s)
    needs = _still_highest([*recent, Need(at_s, need)])
    hosts = _limited({r: max(n.hosts.get(r, 1) for n in needs) for r in need}, config)
    plan = PoolPlan(
        name=pool.name,
        rate=_rounded(rate),
        need=need,
        hosts=hosts,
        is_enough=is_enough,
        changes=tuple(role_changes(pool.hosts, hosts)),
    )
    return plan, replace(memory, needs=needs)


def roles_of(hosts: Sequence[HostFigures]) -> tuple[Role, ...]:
    """The roles that a pool's hosts are planned by: two apart, or one for all, which then do everything."""
    roles = {host.role for host in hosts}
    can_be_apart = any(Role.PREFILL in (host.role, *host.roles) for host in hosts)
    if Role.PREFILL in roles or (Role.DECODE in roles and can_be_apart):
        return Role.PREFILL, Role.DECODE
    return next(((role,) for role in (Role.DECODE, Role.BOTH) if role in roles), (Role.NONE,))


def needed(
    config: PlanConfig, memory: PoolMemory, roles: Sequence[Role], rate: float
) -> dict[Role, int]:
    """Hosts of each role for a rate, without regard to what there is."""
    prompt, output = memory.prompt_tokens, memory.output_tokens
    work, is_apart = rate * memory.stress, len(roles) > 1
    return {
        role: hosts_needed(
            role if is_apart else Role.NONE,
            work,
            prompt,
            output,
            config.capacity,
            config.slo,
            config.max_hosts,
        )
        for role in roles
    }


def _limited(hosts: Mapping[Role, int], config: PlanConfig) -> dict[Role, int]:
    """Hosts of each role, between the least and the most of the pool. Where the most are too few, roles have their
    shares, and one each at least."""
    total = sum(hosts.values())
    if total > config.max_hosts:
        shares = {role: max(1, config.max_hosts * count // total) for role, count in hosts.items()}
        left = config.max_hosts - sum(shares.values())
        largest = max(hosts, key=lambda role: hosts[role])
        return {r: n + max(left, 1 - n) * (r is largest) for r, n in shares.items()}
    largest = max(hosts, key=lambda role: hosts[role])
    return {r: n + max(0, config.min_hosts - total) * (r is largest) for r, n in hosts.items()}


def _still_highest(needs: Sequence[Need]) -> tuple[Need, ...]:
    """The needs that matter to the highest one of each role: no later one has as many of all roles."""
    kept: list[Need] = []
    for one in reversed(needs):
        if not any(_covers(later, one) for later in kept):
            kept.append(one)
    return tuple(reversed(kept))


def _covers(later: Need, earlier: Need) -> bool:
    return all(later.hosts.get(role, 0) >= count for role, count in earlier.hosts.items())


def role_changes(hosts: Sequence[HostFigures], wanted: Mapping[Role, int]) -> Iterator[RoleChange]:
    """Changes by which hosts that are there come closest to what is wanted.

    Hosts on standby come first, then those of a role with too many, one of them at a time: what it does moves to
    others. Hosts that are too many stand by, those with the fewest requests first.
    """
    counts = Counter(host.role for host in hosts)
    spare = sorted(hosts, key=lambda host: (host.num_requests, host.id))
    has_moved = False
    for role, count in wanted.items():
        for host in list(spare):
            if counts[role] >= count:
                break
            is_idle = host.role is Role.STANDBY
            is_surplus = host.role in wanted and counts[host.role] > wanted[host.role]
            if role in host.roles and (is_idle or (is_surplus and not has_moved)):
                has_moved |= not is_idle
                spare.remove(host)
                counts[host.role] -= 1
                counts[role] += 1
                yield RoleChange(host.id, role)
    for host in spare:
        if (
            host.role in wanted
            and counts[host.role] > wanted[host.role]
            and Role.STANDBY in host.roles
            and all(counts[role] >= count for role, count in wanted.items())
        ):
            counts[host.role] -= 1
            yield RoleChange(host.id, Role.STANDBY)


def _mix(old: float, new: float, share: float) -> float:
    return old + share * (new - old)


def _rounded(value: float) -> float:
    return round(value, _DIGITS)
