# SPDX-License-Identifier: Apache-2.0
"""Start-time fair queueing among tenants: Goyal, Vin, Cheng, "Start-time Fair Queuing" (SIGCOMM 1996), over the
service of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

A request has a *start tag* when it arrives: max(V, F), where F is the tenant's finish tag, to which each request
adds its service over the tenant's weight, and V the largest start tag that was admitted. In the order of tags a
tenant that wants less than its share waits for nobody, and of two that want more each gets service in proportion
to its weight. A tag never changes while a request waits, so the order is total and nobody is overtaken for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda.messages.frontend import GenerateRequest

OUTPUT_WEIGHT = 2.0
"""Service of a token of the answer; a token of the prompt that must be computed is 1 (Sheng et al., section 4)."""
_USUAL_WEIGHT = 0.1
"""Weight of the latest answer in the mean length of a tenant's answers."""
_FIRST_GUESS = 64.0
"""Tokens that the first answer of a tenant is taken to have."""
_MAX_IDLE = 1024
"""Tenants without requests that are remembered, and priorities."""


@dataclass(slots=True)
class _Share:
    start: float = 0.0
    """Start tag of the latest request."""
    finish: float = 0.0
    usual_output: float = _FIRST_GUESS
    num_requests: int = 0


@dataclass(slots=True)
class _Level:
    """The tenants of one priority."""

    virtual_time: float = 0.0
    shares: dict[str, _Share] = field(default_factory=dict)
    num_requests: int = 0


class Charge(NamedTuple):
    """Service that a request has been charged for."""

    tenant: str
    weight: float
    priority: int
    start: float
    """Start tag."""
    num_prompt_tokens: int
    service: float


class FairShares:
    """Start tags of requests, apart for each priority. Costs nothing before the first tenant with a name."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}

    def charge(self, message: GenerateRequest) -> Charge:
        """Charges for the tokens to compute and for an answer as long as the tenant's usually are."""
        tenant, weight, priority = message.tenant, message.weight, message.priority
        if not tenant and not self._levels:
            return Charge(tenant, weight, priority, 0.0, 0, 0.0)
        level = self._levels.get(priority)
        if level is None:
            self._forget_idle_levels()
            level = self._levels[priority] = _Level()
        share = level.shares.get(tenant)
        if share is None:
            _forget_idle(level)
            share = level.shares[tenant] = _Share()
        num_prompt_tokens = message.num_prompt_positions
        most = message.work.sampling.max_tokens
        usual = share.usual_output if most is None else min(most, share.usual_output)
        service = num_prompt_tokens + OUTPUT_WEIGHT * usual
        start = max(level.virtual_time, share.start, share.finish)
        share.start, share.finish = start, start + service / weight
        share.num_requests += 1
        level.num_requests += 1
        return Charge(tenant, weight, priority, start, num_prompt_tokens, service)

    def admitted(self, charge: Charge) -> None:
        level = self._levels.get(charge.priority)
        if level is not None:
            level.virtual_time = max(level.virtual_time, charge.start)

    def settle(self, charge: Charge, num_cached_tokens: int | None, num_output_tokens: int) -> None:
        """Charges a request that ends for what was computed instead: for nothing if `num_cached_tokens` is None,
        as it is where the request never ran."""
        level = self._levels.get(charge.priority)
        if level is None or not charge.service:
            return
        share, service = level.shares[charge.tenant], 0.0
        if num_cached_tokens is not None:
            service = charge.num_prompt_tokens - num_cached_tokens
            service += OUTPUT_WEIGHT * num_output_tokens
            share.usual_output += _USUAL_WEIGHT * (num_output_tokens - share.usual_output)
        share.finish += (service - charge.service) / charge.weight
        share.num_requests -= 1
        level.num_requests -= 1

    def _forget_idle_levels(self) -> None:
        if len(self._levels) >= _MAX_IDLE:
            self._levels = {p: level for p, level in self._levels.items() if level.num_requests}


def _forget_idle(level: _Level) -> None:
    """Forgets tenants without requests whose finish tags lie behind: that changes no tag to come."""
    if len(level.shares) >= _MAX_IDLE:
        level.shares = {
            tenant: share
            for tenant, share in level.shares.items()
            if share.num_requests or share.finish > level.virtual_time
        }
