# SPDX-License-Identifier: Apache-2.0
"""The limits of several replicas together: what looks like one engine from above."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any, TypeVar

import msgspec

from pagoda.fleet.placement import has_part_in
from pagoda.messages.frontend import MAX_ROUTERS, EngineReady, GenerateRequest
from pagoda.messages.ranges import MAX_ITEMS, capped
from pagoda.messages.sampling_params import ALL_LOGPROBS
from pagoda.messages.worker_config import Role

T = TypeVar("T")

_NONE: dict[str, Any] = dict.fromkeys(
    ("num_blocks", "max_num_seqs", "max_num_waiting", "max_num_waiting_tokens"), 0
)
"""Limits that are added up, of no replica."""
_MOST_SUMMARIES = 8
"""Different summaries of replicas that are told together."""


class LimitSums:
    """The limits of all replicas, counted as these come, change and go."""

    def __init__(self) -> None:
        self._limits: Counter[EngineReady] = Counter()
        """The number of replicas with the same limits, apart from those that are added up, and from texts."""
        self._sums: Counter[str] = Counter()
        """Limits that are added up, by their fields."""
        self._summaries: Counter[str] = Counter()
        self._routers: Counter[str] = Counter()
        """Ids of routers, and behind how many replicas they are."""
        self._room: Counter[Role] = Counter()
        """Requests that all replicas of a role can have, running and waiting."""
        self._total: EngineReady | None = None
        """The sum of limits, or the last one of replicas that have gone; None when it has to be made anew."""
        self._role: Role | None = None
        """The role that all were given; None while each has its own."""

    @property
    def are_known(self) -> bool:
        return bool(self._limits) or self._total is not None

    @property
    def total(self) -> EngineReady:
        """The limits of all replicas together, of requests that each of them can take.

        Without any replica the last limits hold: requests wait for another one of the same kind.

        Raises RuntimeError if no replica has ever started.
        """
        if not self.are_known:
            raise RuntimeError("The replicas have not started.")
        if self._total is None:
            total = self._sum()
            self._total = msgspec.structs.replace(total, role=self._role or total.role)
        return self._total

    def set_role(self, role: Role) -> None:
        """Gives all replicas together this role, whatever each says."""
        self._role, self._total = role, msgspec.structs.replace(self.total, role=role)

    def count(self, limits: EngineReady | None, change: int) -> None:
        """Counts `change` replicas more with these limits."""
        if limits is None:
            return
        self._room[limits.role] += change * (limits.max_num_seqs + limits.max_num_waiting)
        before = self.total if change < 0 and self._limits.total() == 1 else None
        common = msgspec.structs.replace(limits, host_id="", routers=(), summary="", **_NONE)
        _add(self._limits, common, change)
        _add(self._summaries, limits.summary, change)
        for name in _NONE:
            self._sums[name] += change * getattr(limits, name)
        for router in limits.routers:
            _add(self._routers, router, change)
        self._total = None if self._limits else before

    def _sum(self) -> EngineReady:
        """The limits together, after a look at those that differ in what is not added up."""
        limits, num_replicas = self._limits, self._limits.total()
        first = next(iter(limits))
        added: dict[str, Any] = {name: capped(self._sums[name]) for name in _NONE}
        prefix = f"{num_replicas} replicas, each " if num_replicas > 1 else ""
        return EngineReady(
            max_model_len=min(limit.max_model_len for limit in limits),
            vocab_size=min(limit.vocab_size for limit in limits),
            hidden_size=min(limit.hidden_size for limit in limits),
            feature_bytes=first.feature_bytes,
            encodes_text=first.encodes_text,
            block_size=first.block_size,
            summary=(prefix + "; ".join(islice(self._summaries, _MOST_SUMMARIES)))[:MAX_ITEMS],
            role=_sum_of_roles({limit.role for limit in limits}),
            roles=_common_roles(limits),
            max_logprobs=_least_logprobs({limit.max_logprobs for limit in limits}),
            routers=tuple(islice(self._routers, MAX_ROUTERS)),
            kv_group=first.kv_group,
            **added,
        )

    def room_for(self, request: GenerateRequest) -> int:
        """Requests of this kind that all replicas meant for them can have, running and waiting."""
        room = sum(room for role, room in self._room.items() if has_part_in(role, request))
        return room or self.total.max_num_seqs + self.total.max_num_waiting

    @property
    def max_queued_tokens(self) -> int:
        """Prompt tokens of requests that have not begun, for all replicas: those that may wait there, and those
        that begin at once, of which replicas tell after a step."""
        limits = self.total
        return limits.max_num_waiting_tokens + limits.num_blocks * limits.block_size


def _add(counter: Counter[T], item: T, change: int) -> None:
    counter[item] += change
    if not counter[item]:
        del counter[item]


def _least_logprobs(limits: set[int]) -> int:
    """The least of the limits, of which -1 is the highest."""
    return min(limits - {ALL_LOGPROBS}, default=ALL_LOGPROBS)


def _common_roles(limits: Iterable[EngineReady]) -> tuple[Role, ...]:
    """The roles that each of the replicas can take, in the order of `Role`."""
    common = set(Role).intersection(*(limit.roles for limit in limits))
    return tuple(role for role in Role if role in common)


def _sum_of_roles(roles: set[Role]) -> Role:
    """The role of all replicas together: whatever some of them can do."""
    if roles == {Role.STANDBY}:
        return Role.STANDBY
    holds = any(role.holds_kv for role in roles)
    fetches = any(role.fetches_kv for role in roles)
    if holds and fetches:
        return Role.BOTH
    return Role.PREFILL if holds else Role.DECODE if fetches else Role.NONE
