# SPDX-License-Identifier: Apache-2.0
"""A router over hosts that compute prompts, and hosts that take over their KV and go on.

The decode hosts have all requests. For a long prompt a prefill host gets the same request beside it, and says
where the KV will be. All that a client sees comes from the decode host, which computes what it does not get; so
nothing that happens to prefill hosts is an error. Hosts that do both do the same for one another, where that is
less work. Without the plugin that moves KV between engines, prompts are computed where they are answered.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pkgutil import resolve_name

from pagoda.concurrency.async_utils import cancel_all
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.offload import Offload
from pagoda.fleet.policies import POLICIES, Policy
from pagoda.fleet.replica import Replica
from pagoda.kv.connector_plugin import find_connector, has_connector
from pagoda.messages.worker_config import Role
from pagoda.telemetry.tracer import Tracer

DEFAULT_MIN_TOKENS = 128
"""Tokens from which on a prompt is computed elsewhere; `benchmarks.handoff threshold` measures what is best."""
OpenOffload = Callable[[Dispatcher, int], Offload]
"""Gives the offload to the replicas of a dispatcher, of prompts with so many tokens to compute or more."""


class PrefillDecodeRouter:
    """The hosts behind a router, by what they do."""

    def __init__(
        self,
        policy: Policy,
        min_tokens: int = DEFAULT_MIN_TOKENS,
        tracer: Tracer | None = None,
        *,
        no_replica_timeout_s: float = math.inf,
        max_requests: int | None = None,
    ) -> None:
        """`policy` chooses among hosts that answer; prefill hosts are chosen by what waits for them.

        Prompts of which `min_tokens` or more are not cached where they are answered are computed by prefill hosts.
        `no_replica_timeout_s` and `max_requests` are as in `Dispatcher`.
        """
        # Decode hosts compute what no prefill host does, so all prefill hosts may be ejected.
        by_work = POLICIES["least-pending-tokens"]
        self.prefill = Dispatcher([], by_work, keeps_half=False, tracer=tracer)
        offload = None
        if has_connector():
            open_offload: OpenOffload = resolve_name(find_connector().offload)
            offload = open_offload(self.prefill, min_tokens)
        self.dispatcher = Dispatcher(
            [],
            policy,
            offload,
            tracer=tracer,
            no_replica_timeout_s=no_replica_timeout_s,
            max_requests=max_requests,
        )
        self.prefill.watch(self.dispatcher.slots.update_subscriptions)
        self._unwatch: dict[Replica, Callable[[], None]] = {}
        self._leaving: set[Replica] = set()
        self._finishing: dict[Replica, asyncio.Task[None]] = {}
        """Hosts that computed prompts for others until their role changed, and have not finished those."""

    def _homes(self, replica: Replica) -> list[Dispatcher]:
        both = (self.dispatcher, self.prefill)
        return [one for one in both if one.slots.get(replica) is not None]

    def add(self, replica: Replica) -> None:
        """Takes in a host that has started. A prefill host also answers, as long as nobody else does."""
        self.dispatcher.add(replica)
        self._unwatch[replica] = replica.watch(lambda: self._sort(replica))
        self._sort(replica)

    def _sort(self, replica: Replica) -> None:
        """Follows the host's role, which may change: that of a router is the role of its hosts."""
        self._place(replica)
        if (
            self.prefill.slots.get(replica) is not None
            and replica.limits.role is not Role.PREFILL
            and replica not in self._finishing
        ):
            self._finishing[replica] = asyncio.create_task(self._finish(replica))
        self.dispatcher.slots.update_subscriptions()

    def _place(self, replica: Replica) -> None:
        """Lets the host compute prompts for others, and be asked to, as its role is."""
        is_prefill = replica.limits.role is Role.PREFILL
        if self.prefill.slots.get(replica) is not None:
            is_leaving = not is_prefill or replica in self._leaving
            self.prefill.set_leaving(replica, is_leaving)
        elif is_prefill:
            self.prefill.add(replica)

    async def _finish(self, replica: Replica) -> None:
        """Forgets a host as one for prompts as soon as it has computed those that it was given, unless its role
        is the old one by then."""
        try:
            await self.prefill.emptied(replica)
        finally:
            del self._finishing[replica]
        if replica.limits.role is not Role.PREFILL:
            self.prefill.remove(replica)
            self.dispatcher.slots.update_subscriptions()

    def set_leaving(self, replica: Replica, is_leaving: bool) -> None:
        """Gives a host that leaves nothing new; its requests go on there."""
        (self._leaving.add if is_leaving else self._leaving.discard)(replica)
        self.dispatcher.set_leaving(replica, is_leaving)
        self._place(replica)

    def num_requests(self, replica: Replica) -> int:
        return sum(home.num_requests(replica) for home in self._homes(replica))

    async def emptied(self, replica: Replica) -> None:
        for home in self._homes(replica):
            await home.emptied(replica)

    def remove(self, replica: Replica) -> None:
        """Forgets a host; may be called twice."""
        self._unwatch.pop(replica, lambda: None)()
        self._leaving.discard(replica)
        if replica in self._finishing:
            self._finishing[replica].cancel()
        for home in self._homes(replica):
            home.remove(replica)

    async def close(self) -> None:
        await cancel_all(list(self._finishing.values()))
        await self.dispatcher.close()
        await self.prefill.close()
