# SPDX-License-Identifier: Apache-2.0
"""The pools of a router: the hosts of one model each, and which of them a host belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from pagoda.errors import ConfigError
from pagoda.fleet.dispatcher import DEFAULT_NO_REPLICA_TIMEOUT_S
from pagoda.fleet.policies import DEFAULT_POLICY, PolicyName
from pagoda.messages.frontend import PROTOCOL_VERSION, Hello, HostPool, PoolModel
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.prefill_decode import DEFAULT_MIN_TOKENS


class Distance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Worth of the place of a host, in tokens of work before a request elsewhere. A far host gets a request when
    nearer ones have so much more to do."""

    tokens_per_second: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Tokens that a host computes in a second, by which seconds of distance are weighed; 0 weighs none."""
    other_region_ms: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Milliseconds that count besides the round trip for hosts of another region than the router's."""
    price_tokens: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Tokens that one unit of price is worth."""

    def tokens(self, place: HostPool, round_trip_s: float, region: str) -> int:
        """`region` is the router's. Below 16 tokens a place counts nothing, so that neighbours share evenly, and
        tokens are rounded to an eighth, so that it is seldom another."""
        seconds = round_trip_s + (self.other_region_ms / 1e3 if place.region != region else 0.0)
        total = min(
            2**40, round(seconds * self.tokens_per_second + place.price * self.price_tokens)
        )
        shift = max(0, total.bit_length() - 4)
        return (total >> shift << shift) if total >= 16 else 0


NO_DISTANCE = Distance()


@dataclass(frozen=True)
class PoolConfig:
    """One pool: its model, the choice among its hosts, and how many requests it may have."""

    model: str = ""
    model_digest: str = ""
    policy: PolicyName = DEFAULT_POLICY
    remote_prefill_min_tokens: int = DEFAULT_MIN_TOKENS
    """Prompts of which as many tokens are not cached are computed by prefill hosts, where there are any."""
    no_replica_timeout_s: float = DEFAULT_NO_REPLICA_TIMEOUT_S
    """Seconds that a request waits while no host takes requests."""
    distance: Distance = NO_DISTANCE
    max_requests: int | None = None
    """Requests that the pool may have, running and waiting; None for as many as its hosts take."""


def router_identity(router_id: str, pools: Mapping[str, PoolConfig], region: str = "") -> Identity:
    """A router as hosts see it; `pools` are by name."""
    first = next(iter(pools.values()))
    offered = tuple(PoolModel(name, one.model, one.model_digest) for name, one in pools.items())
    return Identity(
        router_id,
        first.model,
        first.model_digest,
        is_router=True,
        pools=offered,
        region=region,
    )


def pool_for(host: Identity, hello: Hello) -> PoolModel:
    """The pool of a router that a host belongs to: the one that it names, else of the pools of its model the one
    that has the host's name for it, else the first.

    Raises ConfigError: there is none, or the router is of another version.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ConfigError(
            f"The router speaks protocol {hello.protocol_version}, the host {PROTOCOL_VERSION}; "
            "install the same version of Pagoda on both."
        )
    fitting = [pool for pool in hello.pools if pool.digest == host.model_digest]
    if host.pool and any(pool.pool for pool in hello.pools):
        found = [pool for pool in fitting if pool.pool == host.pool]
        if not found:
            raise ConfigError(
                f"The router has no pool {host.pool!r} of the host's model {host.model}; "
                "name one that it has with --pool, or serve the same files."
            )
        return found[0]
    if not fitting:
        names = ", ".join(dict.fromkeys(pool.model for pool in hello.pools))[:200]
        raise ConfigError(
            f"The router serves {names}, and {host.model} at the host is another model or another "
            "version of it; serve the same files."
        )
    return next((pool for pool in fitting if pool.pool == host.model), fitting[0])
